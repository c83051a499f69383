//! What models there are and where they lie: a folder of GGUF files, whoever put them there, and a catalogue of what
//! can be fetched into it.

pub mod catalogue;

use crate::Common;
use anyhow::{Context, Result, bail};
use catalogue::{Catalogue, Entry, Kind};
use halo_llama::gguf::{self, Header, Value};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The file of an embedding model that tells it from others; what else it needs lies beside it.
const ONNX: &str = "model.onnx";

/// What to do about one that is none.
const EMBEDDERS: &str = "`halo models` lists those of the kind embedding, and `halo models pull` fetches one";

/// A model that is here, or a file that should be one.
#[derive(Clone, Debug)]
pub struct Model {
    /// What it is called: its name in the catalogue, else that of its file.
    pub name: String,
    /// What it is for.
    pub kind: Kind,
    /// Its file.
    pub path: PathBuf,
    /// Bytes on disk.
    pub bytes: u64,
    /// How its numbers are kept.
    pub quantisation: Option<String>,
    /// How many tokens it was made to see.
    pub context: Option<u64>,
    /// Of what kind it is.
    pub architecture: Option<String>,
    /// Why its cells cannot be taken out and put back; none where they can.
    pub no_surgery: Option<String>,
    /// Why it cannot be used.
    pub problem: Option<String>,
}

/// The models folder, and what can be fetched into it.
pub struct Models {
    /// Where models lie.
    pub folder: PathBuf,
    /// What can be fetched.
    pub catalogue: Catalogue,
}

/// The file of a model: the one that speaks where none is named, else by its name, or by a path, which has a separator
/// in it (`./model.gguf`), so that no file that happens to lie around takes the place of a model.
///
/// # Errors
/// When it is not here, or cannot be used; the error says what to do.
pub fn find(common: &Common, name: Option<&str>) -> Result<PathBuf> {
    let models = Models::of(common)?;
    match name {
        Some(address) if halo_remote::Remote::is_address(address) => {
            bail!("{address} is a server, and this needs a model of this machine: `halo models` lists those")
        }
        Some(url) if catalogue::is_address(url) => bail!("fetch it first: `halo models pull {url}`"),
        Some(path) if is_path(path) => match fs::metadata(path) {
            Ok(about) if about.is_dir() => bail!("{path} is a folder: name the model file in it"),
            Ok(_) => Ok(path.into()),
            Err(error) => Err(error).with_context(|| format!("cannot open the model {path}")),
        },
        Some(name) => models.named(name),
        None => {
            let speaker =
                models.catalogue.speaker().context("the catalogue has no default model: name one")?;
            models.named(&speaker.name)
        }
    }
}

/// The folder of an embedding model, which holds its `model.onnx`: of the default one where none is named, and none
/// where that was not fetched; else by its name, or by a path, of the folder or of the `model.onnx` in it.
///
/// # Errors
/// When the one that is named is not here, or one cannot be used; the error says what to do.
pub fn embedder(common: &Common, name: Option<&str>) -> Result<Option<PathBuf>> {
    Models::of(common)?.embedder(name)
}

/// Whether a text is meant as a path, and not as a name.
pub fn is_path(text: &str) -> bool {
    text.contains(std::path::is_separator)
}

impl Models {
    /// The models of a data folder.
    ///
    /// # Errors
    /// When there is no data folder, or the catalogue is wrong.
    pub fn of(common: &Common) -> Result<Self> {
        let data = common.data_folder().context("this system names no data folder: give one with --data")?;
        Ok(Self { folder: data.join("models"), catalogue: Catalogue::load()? })
    }

    /// All that is here, by name.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn here(&self) -> Result<Vec<Model>> {
        let failed = || format!("cannot read the models folder {}", self.folder.display());
        let mut found = Vec::new();
        match fs::read_dir(&self.folder) {
            Ok(files) => {
                for file in files {
                    let name = file.with_context(failed)?.file_name();
                    found.extend(self.look_at(&name.to_string_lossy(), self.folder.join(&name)));
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(failed),
        }
        found.extend(self.catalogue.models.iter().filter_map(|entry| self.assembled(entry)));
        found.sort_by(|a, b| (&a.name, &a.path).cmp(&(&b.name, &b.path)));
        Ok(found)
    }

    /// The file of a model that is here.
    fn named(&self, name: &str) -> Result<PathBuf> {
        let here = self.here()?;
        let file =
            |m: &Model| m.path.file_name().map(|f| f.to_string_lossy().into_owned()).unwrap_or_default();
        let found = here
            .iter()
            .find(|m| m.name == name)
            .or_else(|| here.iter().find(|m| file(m) == name || stem(&file(m)) == name));
        match found {
            Some(Model { problem: Some(problem), .. }) => bail!("{name} cannot be used: {problem}"),
            Some(model) => Ok(model.path.clone()),
            None if self.catalogue.get(name).is_some() => {
                bail!("{name} is not here: `halo models pull {name}` fetches it{}", also(&here))
            }
            None => bail!("{}", self.unknown(name, &here)),
        }
    }

    fn embedder(&self, name: Option<&str>) -> Result<Option<PathBuf>> {
        if let Some(path) = name.filter(|name| is_path(name)) {
            return embedder_at(path).map(Some);
        }
        let Some(wanted) = name.or(self.catalogue.embedder().map(|entry| entry.name.as_str())) else {
            return Ok(None);
        };
        let here = self.here()?;
        match here.iter().find(|m| m.name == wanted) {
            Some(Model { problem: Some(problem), .. }) => bail!("{wanted} cannot be used: {problem}"),
            Some(Model { path, .. }) if path.ends_with(ONNX) => Ok(path.parent().map(Path::to_owned)),
            Some(Model { kind: Kind::Chat, .. }) => bail!("{}", speaks(wanted)),
            Some(_) => bail!("{wanted} is no folder with a {ONNX} in it, and cannot be used: {EMBEDDERS}"),
            None if name.is_none() => Ok(None),
            None => match self.catalogue.get(wanted).map(|entry| entry.kind) {
                Some(Kind::Embedding) => {
                    bail!("{wanted} is not here: `halo models pull {wanted}` fetches it")
                }
                Some(Kind::Chat) => bail!("{}", speaks(wanted)),
                None => bail!("{}", self.unknown(wanted, &here)),
            },
        }
    }

    /// What to say of a name that nobody knows.
    pub fn unknown(&self, name: &str, here: &[Model]) -> String {
        let all =
            here.iter().map(|m| m.name.as_str()).chain(self.catalogue.models.iter().map(|e| e.name.as_str()));
        let near = nearest(name, all);
        let advice = match near.as_slice() {
            [] => {
                "`halo models` lists what is here and what can be pulled with `halo models pull`".to_owned()
            }
            [one] => {
                format!("did you mean {one}? `halo models` lists all; `halo models pull NAME` fetches one")
            }
            [some @ .., last] => format!(
                "did you mean {} or {last}? `halo models` lists all; `halo models pull NAME` fetches one",
                some.join(", ")
            ),
        };
        let file = if Path::new(name).is_file() {
            format!("; to take the file of that name write ./{name}")
        } else {
            String::new()
        };
        format!("there is no model '{name}': {advice}{file}")
    }

    /// What one file in the folder is; nothing where it is none of ours to look at.
    fn look_at(&self, file: &str, path: PathBuf) -> Option<Model> {
        if file.starts_with('.') {
            return None;
        }
        let mut model = match fs::metadata(&path) {
            Ok(about) if about.is_dir() => return None,
            Ok(about) => read(path, about.len()),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                bad(path, 0, "it points to a file that is gone".into())
            }
            Err(error) => bad(path, 0, format!("it cannot be read: {error}")),
        };
        // Another model that has the file's name is not the one of the catalogue; a wreck is.
        let same = |e: &Entry| e.files[0].bytes == model.bytes || model.problem.is_some();
        let known = |e: &&Entry| e.files[0].name == file && same(e);
        model.name = match self.catalogue.models.iter().find(known) {
            Some(entry) => entry.name.clone(),
            None if self.catalogue.get(stem(file)).is_some() => file.to_owned(),
            None => stem(file).to_owned(),
        };
        Some(model)
    }

    /// A model of several files, if any of them is here.
    fn assembled(&self, entry: &Entry) -> Option<Model> {
        let main = self.folder.join(&entry.files[0].name);
        if entry.files[0].name.ends_with(".gguf") || !main.parent()?.is_dir() {
            return None;
        }
        let again = format!("`halo models pull {}` fetches it", entry.name);
        let (mut bytes, mut problem) = (0, None);
        for file in &entry.files {
            let wrong = match fs::metadata(self.folder.join(&file.name)).map(|about| about.len()) {
                Ok(len) => {
                    bytes += len;
                    (len != file.bytes)
                        .then(|| format!("{} is {len} bytes long and should be {}", file.name, file.bytes))
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    Some(format!("{} is missing", file.name))
                }
                Err(error) => Some(format!("{} cannot be read: {error}", file.name)),
            };
            problem = problem.or(wrong.map(|wrong| format!("{wrong}; {again}")));
        }
        Some(Model {
            name: entry.name.clone(),
            kind: entry.kind,
            path: main,
            bytes,
            quantisation: entry.quantisation.clone(),
            context: entry.context,
            architecture: entry.architecture.clone(),
            no_surgery: Some("it does not speak: it has no window".into()),
            problem,
        })
    }
}

fn speaks(name: &str) -> String {
    format!("{name} speaks, and is no embedding model: {EMBEDDERS}")
}

/// The folder of an embedding model at a path.
fn embedder_at(path: &str) -> Result<PathBuf> {
    if path.contains("://") {
        bail!("{path} is an address, and an embedding model lies on this machine: {EMBEDDERS}");
    }
    let about = fs::metadata(path).with_context(|| format!("cannot open the embedding model {path}"))?;
    let folder = match (about.is_dir(), Path::new(path)) {
        (true, folder) if folder.join(ONNX).is_file() => folder,
        (false, file) if file.ends_with(ONNX) => file.parent().context("a file lies in a folder")?,
        _ => bail!("{path} is no embedding model: name a folder with a {ONNX} in it, or that file"),
    };
    Ok(folder.to_owned())
}

/// What a file says of itself.
fn read(path: PathBuf, bytes: u64) -> Model {
    let header = match gguf::read(&path) {
        Ok(header) => header,
        Err(error) => return bad(path, bytes, error.to_string()),
    };
    let kind = kind(&header);
    let reason = match kind {
        Kind::Chat => header.no_surgery().map(str::to_owned),
        Kind::Embedding => Some("it does not speak: it has no window".into()),
    };
    Model {
        name: String::new(),
        kind,
        path,
        bytes,
        quantisation: quantisation(&header).map(str::to_owned),
        context: match header.of_kind("context_length") {
            Some(Value::Int(n)) => u64::try_from(*n).ok(),
            _ => None,
        },
        architecture: header.architecture().map(str::to_owned),
        no_surgery: reason,
        problem: unusable(&header),
    }
}

fn bad(path: PathBuf, bytes: u64, problem: String) -> Model {
    Model {
        name: String::new(),
        kind: Kind::Chat,
        path,
        bytes,
        quantisation: None,
        context: None,
        architecture: None,
        no_surgery: Some("it cannot be used".into()),
        problem: Some(problem),
    }
}

/// Why a sound file is no model to load by itself.
pub fn unusable(header: &Header) -> Option<String> {
    let text = |key: &str| match header.values.get(key) {
        Some(Value::Text(text)) => text.as_str(),
        _ => "",
    };
    let parts = match header.values.get("split.count") {
        Some(Value::Int(n)) if *n > 1 => *n,
        _ => 1,
    };
    match (text("general.type"), header.architecture()) {
        ("adapter", _) => Some("it is an adapter, no model of its own".into()),
        ("mmproj", _) | (_, Some("clip")) => {
            Some("it is the eye of another model, no model of its own".into())
        }
        ("imatrix", _) => Some("it is a table for making models smaller, no model".into()),
        (_, None) => Some("it does not say what kind of model it is".into()),
        _ if parts > 1 => Some(format!(
            "it is one of {parts} parts: join them with `llama-gguf-split --merge` and take the whole"
        )),
        _ => None,
    }
}

/// Whether it speaks, or turns text into numbers.
fn kind(header: &Header) -> Kind {
    let name = header.architecture().unwrap_or_default();
    let encodes = name.contains("bert") || ["t5encoder", "gemma-embedding", "llama-embed"].contains(&name);
    let pools = matches!(header.of_kind("pooling_type"), Some(Value::Int(1..=4)));
    if encodes || pools { Kind::Embedding } else { Kind::Chat }
}

/// How most of its numbers are kept, by the name that such files bear.
fn quantisation(header: &Header) -> Option<&'static str> {
    let Some(Value::Int(kind)) = header.values.get("general.file_type") else { return None };
    // A guess is marked by a bit.
    Some(match kind & !1024 {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        7 => "Q8_0",
        8 => "Q5_0",
        9 => "Q5_1",
        10 => "Q2_K",
        11 => "Q3_K_S",
        12 => "Q3_K_M",
        13 => "Q3_K_L",
        14 => "Q4_K_S",
        15 => "Q4_K_M",
        16 => "Q5_K_S",
        17 => "Q5_K_M",
        18 => "Q6_K",
        19 => "IQ2_XXS",
        20 => "IQ2_XS",
        21 => "Q2_K_S",
        22 => "IQ3_XS",
        23 => "IQ3_XXS",
        24 => "IQ1_S",
        25 => "IQ4_NL",
        26 => "IQ3_S",
        27 => "IQ3_M",
        28 => "IQ2_S",
        29 => "IQ2_M",
        30 => "IQ4_XS",
        31 => "IQ1_M",
        32 => "BF16",
        36 => "TQ1_0",
        37 => "TQ2_0",
        38 => "MXFP4",
        39 => "NVFP4",
        _ => return None,
    })
}

/// The name of a file without its ending.
fn stem(file: &str) -> &str {
    let cut = file.len().saturating_sub(".gguf".len());
    match file.get(cut..) {
        Some(end) if cut > 0 && end.eq_ignore_ascii_case(".gguf") => &file[..cut],
        _ => file,
    }
}

/// What else could be taken instead.
fn also(here: &[Model]) -> String {
    let names: Vec<_> = here
        .iter()
        .filter(|m| m.kind == Kind::Chat && m.problem.is_none())
        .map(|m| m.name.as_str())
        .take(5)
        .collect();
    if names.is_empty() { String::new() } else { format!("; here are: {}", names.join(", ")) }
}

/// The names that are most like one that nobody knows, at most three, if any is like it at all.
fn nearest<'a>(text: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let text: String = text.chars().take(80).collect::<String>().to_lowercase();
    let likeness = |name: &str| {
        let name = name.to_lowercase();
        let inside = text.len() >= 3 && name.contains(&text);
        strsim::normalized_damerau_levenshtein(&text, &name).max(if inside { 0.9 } else { 0.0 })
    };
    let mut near: Vec<_> =
        names.map(|name| (likeness(name), name)).filter(|(alike, _)| *alike >= 0.5).collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    near.dedup_by_key(|n| n.1);
    near.into_iter().map(|(_, name)| name).take(3).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_nearly_right() {
        let known = ["smollm2", "minilm", "qwen2.5-coder-1.5b"];
        for (text, near) in [
            ("smolm2", &["smollm2"][..]),
            ("QWEN", &["qwen2.5-coder-1.5b"]),
            ("minillm", &["minilm"]),
            ("zzz", &[]),
            ("", &[]),
        ] {
            assert_eq!(nearest(text, known.into_iter()), near, "{text}");
        }
    }

    #[test]
    fn embedders_are_found() {
        let folder = tempfile::tempdir().expect("made");
        let models =
            Models { folder: folder.path().to_owned(), catalogue: Catalogue::load().expect("sound") };
        let fails = |name: &str| models.embedder(Some(name)).expect_err(name).to_string();
        assert_eq!(models.embedder(None).expect("nothing is wrong"), None);
        for (name, says) in [
            ("e5-small", "e5-small is not here: `halo models pull e5-small` fetches it"),
            ("e5-smal", "there is no model 'e5-smal': did you mean e5-small?"),
            ("smollm2", "smollm2 speaks, and is no embedding model"),
            ("http://host/e5", "http://host/e5 is an address"),
            ("./nowhere", "cannot open the embedding model ./nowhere"),
        ] {
            assert!(fails(name).contains(says), "{}", fails(name));
        }
        // They are known by their length when they are listed, and checked when they are pulled and when they are loaded.
        for file in &models.catalogue.embedder().expect("there").files {
            let path = folder.path().join(&file.name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::File::create(path).and_then(|made| made.set_len(file.bytes)).expect("made");
        }
        let place = folder.path().join("e5-small");
        let (at, file) = (place.display().to_string(), place.join(ONNX).display().to_string());
        for name in [None, Some("e5-small"), Some(at.as_str()), Some(file.as_str())] {
            assert_eq!(models.embedder(name).expect("here"), Some(place.clone()), "{name:?}");
        }
        for path in [folder.path().display().to_string(), place.join("config.json").display().to_string()] {
            assert!(fails(&path).contains("name a folder with a model.onnx in it"), "{}", fails(&path));
        }
        fs::remove_file(place.join("tokenizer.json")).expect("removed");
        for wreck in [None, Some("e5-small")] {
            let said = models.embedder(wreck).expect_err("a file is missing").to_string();
            assert!(
                said.contains("tokenizer.json is missing; `halo models pull e5-small` fetches it"),
                "{said}"
            );
        }
    }

    #[test]
    fn endings_are_cut_off() {
        for (file, name) in
            [("a.b.gguf", "a.b"), ("A.GGUF", "A"), (".gguf", ".gguf"), ("é", "é"), ("x.bin", "x.bin")]
        {
            assert_eq!(stem(file), name);
        }
    }
}
