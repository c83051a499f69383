//! Writes a setting to the settings file and keeps the rest as the user wrote it.

use super::load::parse_toml_or_string;
use super::value::TomlValue;
use crate::file::{MAX_SETTINGS_BYTES, read_regular_text};
use anyhow::{Context, Result, bail};
use std::io::Write;
use std::path::Path;
use toml_edit::{DocumentMut, Item, Table, TableLike};

/// The text of a settings file with a key set or removed.
fn set_toml_key(text: &str, key: &str, value: Option<&str>) -> Result<String> {
    let mut document: DocumentMut = text.parse().context("the settings file is not valid TOML")?;
    let mut path: Vec<&str> = key.split('.').collect();
    let last = path.pop().unwrap_or_default();
    let mut table: &mut dyn TableLike = document.as_table_mut();
    for part in path {
        if table.get(part).is_none() {
            if value.is_none() {
                return Ok(text.to_owned());
            }
            table.insert(part, Item::Table(Table::new()));
        }
        let Some(inner) = table.get_mut(part).and_then(Item::as_table_like_mut) else {
            bail!("{part} is not a section in the settings file: correct it by hand");
        };
        table = inner;
    }
    match value {
        Some(value) => {
            let item = toml_edit::value(to_toml_edit_value(&parse_toml_or_string(value))?);
            table.insert(last, item);
        }
        None => {
            table.remove(last);
        }
    }
    Ok(document.to_string())
}

fn to_toml_edit_value(raw: &TomlValue) -> Result<toml_edit::Value> {
    Ok(raw.to_string().parse()?)
}

/// Sets or removes a key. The file is replaced atomically.
pub fn write_setting(file: &Path, key: &str, value: Option<&str>) -> Result<()> {
    let text = match read_regular_text(file, MAX_SETTINGS_BYTES) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", file.display())),
    };
    let text = set_toml_key(&text, key, value)?;
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let cannot = || format!("cannot write {}", file.display());
    std::fs::create_dir_all(folder).with_context(cannot)?;
    let mut beside = tempfile::NamedTempFile::new_in(folder).with_context(cannot)?;
    beside.write_all(text.as_bytes()).with_context(cannot)?;
    beside.as_file().sync_all().with_context(cannot)?;
    beside.persist(file).with_context(cannot)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_file_keeps_comments_when_written() {
        let text = "# mine\n[context]\nmax_tokens = 4000 # enough\n\n[brightness]\nrank = \"peak\"\n";
        let set = |text: &str, key: &str, value: Option<&str>| {
            set_toml_key(text, key, value).expect("it can be set")
        };
        let other = set(text, "context.max_tokens", Some("5000"));
        assert_eq!(other, text.replace("4000 # enough", "5000"));
        let more = set(text, "chat.system", Some("Be \"brief\".\nAlways."));
        assert!(more.starts_with(text) && more.contains("[chat]"), "{more}");
        let read: toml::Table = more.parse().expect("it is TOML");
        assert_eq!(read["chat"]["system"].as_str(), Some("Be \"brief\".\nAlways."));
        assert_eq!(set(text, "brightness.rank", None), text.replace("rank = \"peak\"\n", ""));
        assert_eq!(set(text, "ttl.seed.user", None), text, "what is not there stays away");
        assert!(
            set("", "ttl.seed.user", Some("1.5")).contains("[ttl.seed]\nuser = 1.5"),
            "sections within sections"
        );
        assert!(set_toml_key("context = 1", "context.max_tokens", Some("1")).is_err());
    }
}
