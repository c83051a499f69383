//! What models there are and where they lie: a folder of GGUF files, whoever put them there, and a catalogue of what
//! can be fetched into it.

pub mod catalogue;

use anyhow::{Context, Result, bail};
use catalogue::{Catalogue, CatalogueEntry, ModelKind};
use halo_llama::gguf::{self, GgufHeader, GgufValue};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The file of an embedding model that tells it from others; what else it needs lies beside it.
const ONNX_FILE: &str = "model.onnx";

/// What to do about one that is none.
const EMBEDDER_HINT: &str =
    "`halo models` lists those of the kind embedding, and `halo models pull` fetches one";

/// A model that is here, or a file that should be one.
#[derive(Clone, Debug)]
pub struct InstalledModel {
    /// What it is called: its name in the catalogue, else that of its file.
    pub name: String,
    /// What it is for.
    pub kind: ModelKind,
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
    pub no_kv_edit_reason: Option<String>,
    /// Why it cannot be used.
    pub problem: Option<String>,
}

/// The models folder, and what can be fetched into it.
pub struct ModelLibrary {
    /// Where models lie.
    pub folder: PathBuf,
    /// What can be fetched.
    pub catalogue: Catalogue,
}

/// Whether a text is meant as a path, and not as a name.
pub fn is_path(text: &str) -> bool {
    text.contains(std::path::is_separator)
}

impl ModelLibrary {
    /// The models of a data folder.
    pub fn open(data_dir: &Path) -> Result<Self> {
        Ok(Self { folder: data_dir.join("models"), catalogue: Catalogue::load()? })
    }

    /// The file of a model, by name or path; the default chat model where none is named. A path has a separator in it
    /// (`./model.gguf`), so that a file in the working directory never shadows the name of a model.
    pub fn find_model_file(&self, name: Option<&str>) -> Result<PathBuf> {
        match name {
            Some(address) if halo_remote::RemoteModel::is_address(address) => {
                bail!("{address} is a server, and this needs a local model: `halo models` lists those")
            }
            Some(url) if catalogue::is_http_url(url) => bail!("download it first: `halo models pull {url}`"),
            Some(path) if is_path(path) => match fs::metadata(path) {
                Ok(metadata) if metadata.is_dir() => {
                    bail!("{path} is a folder: name the model file in it")
                }
                Ok(_) => Ok(path.into()),
                Err(error) => Err(error).with_context(|| format!("cannot open the model {path}")),
            },
            Some(name) => self.find_by_name(name),
            None => {
                let default = self.catalogue.default_chat_model();
                let default = default.context("the catalogue has no default model: name one")?;
                self.find_by_name(&default.name)
            }
        }
    }

    /// All that is here, by name.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn installed(&self) -> Result<Vec<InstalledModel>> {
        let failed = || format!("cannot read the models folder {}", self.folder.display());
        let mut found = Vec::new();
        match fs::read_dir(&self.folder) {
            Ok(files) => {
                for file in files {
                    let name = file.with_context(failed)?.file_name();
                    found.extend(self.inspect_file(&name.to_string_lossy(), self.folder.join(&name)));
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(failed),
        }
        found.extend(self.catalogue.models.iter().filter_map(|entry| self.inspect_multi_file_model(entry)));
        found.sort_by(|a, b| (&a.name, &a.path).cmp(&(&b.name, &b.path)));
        Ok(found)
    }

    /// The file of a model that is here.
    fn find_by_name(&self, name: &str) -> Result<PathBuf> {
        let here = self.installed()?;
        let file = |m: &InstalledModel| {
            m.path.file_name().map(|f| f.to_string_lossy().into_owned()).unwrap_or_default()
        };
        let found = here
            .iter()
            .find(|m| m.name == name)
            .or_else(|| here.iter().find(|m| file(m) == name || strip_gguf_extension(&file(m)) == name));
        match found {
            Some(InstalledModel { problem: Some(problem), .. }) => bail!("{name} cannot be used: {problem}"),
            Some(model) => Ok(model.path.clone()),
            None if self.catalogue.get(name).is_some() => {
                bail!(
                    "{name} is not here: `halo models pull {name}` fetches it{}",
                    installed_models_hint(&here)
                )
            }
            None => bail!("{}", self.unknown_model_message(name, &here)),
        }
    }

    /// The folder of an embedding model, which holds its `model.onnx`, by name or path (of the folder or the file). The
    /// default embedder where none is named; none if that is not installed.
    pub fn find_embedder(&self, name: Option<&str>) -> Result<Option<PathBuf>> {
        if let Some(path) = name.filter(|name| is_path(name)) {
            return embedder_dir_at(path).map(Some);
        }
        let Some(wanted) = name.or(self.catalogue.default_embedder().map(|entry| entry.name.as_str())) else {
            return Ok(None);
        };
        let here = self.installed()?;
        match here.iter().find(|m| m.name == wanted) {
            Some(InstalledModel { problem: Some(problem), .. }) => {
                bail!("{wanted} cannot be used: {problem}")
            }
            Some(InstalledModel { path, .. }) if path.ends_with(ONNX_FILE) => {
                Ok(path.parent().map(Path::to_owned))
            }
            Some(InstalledModel { kind: ModelKind::Chat, .. }) => {
                bail!("{}", not_an_embedder_message(wanted))
            }
            Some(_) => {
                bail!("{wanted} is no folder with a {ONNX_FILE} in it, and cannot be used: {EMBEDDER_HINT}")
            }
            None if name.is_none() => Ok(None),
            None => match self.catalogue.get(wanted).map(|entry| entry.kind) {
                Some(ModelKind::Embedding) => {
                    bail!("{wanted} is not here: `halo models pull {wanted}` fetches it")
                }
                Some(ModelKind::Chat) => bail!("{}", not_an_embedder_message(wanted)),
                None => bail!("{}", self.unknown_model_message(wanted, &here)),
            },
        }
    }

    /// What to say of a name that nobody knows.
    pub fn unknown_model_message(&self, name: &str, here: &[InstalledModel]) -> String {
        let all =
            here.iter().map(|m| m.name.as_str()).chain(self.catalogue.models.iter().map(|e| e.name.as_str()));
        let near = closest_names(name, all);
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
    fn inspect_file(&self, file: &str, path: PathBuf) -> Option<InstalledModel> {
        if file.starts_with('.') {
            return None;
        }
        let mut model = match fs::metadata(&path) {
            Ok(about) if about.is_dir() => return None,
            Ok(about) => read_gguf_model(path, about.len()),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                unusable_model(path, 0, "it points to a file that is gone".into())
            }
            Err(error) => unusable_model(path, 0, format!("it cannot be read: {error}")),
        };
        // Another model that has the file's name is not the one of the catalogue; a wreck is.
        let same = |e: &CatalogueEntry| e.files[0].bytes == model.bytes || model.problem.is_some();
        let known = |e: &&CatalogueEntry| e.files[0].name == file && same(e);
        model.name = match self.catalogue.models.iter().find(known) {
            Some(entry) => entry.name.clone(),
            None if self.catalogue.get(strip_gguf_extension(file)).is_some() => file.to_owned(),
            None => strip_gguf_extension(file).to_owned(),
        };
        Some(model)
    }

    /// A model of several files, if any of them is here.
    fn inspect_multi_file_model(&self, entry: &CatalogueEntry) -> Option<InstalledModel> {
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
        Some(InstalledModel {
            name: entry.name.clone(),
            kind: entry.kind,
            path: main,
            bytes,
            quantisation: entry.quantisation.clone(),
            context: entry.context,
            architecture: entry.architecture.clone(),
            no_kv_edit_reason: Some("it does not speak: it has no window".into()),
            problem,
        })
    }
}

fn not_an_embedder_message(name: &str) -> String {
    format!("{name} speaks, and is no embedding model: {EMBEDDER_HINT}")
}

/// The folder of an embedding model at a path.
fn embedder_dir_at(path: &str) -> Result<PathBuf> {
    if path.contains("://") {
        bail!("{path} is an address, and an embedding model lies on this machine: {EMBEDDER_HINT}");
    }
    let about = fs::metadata(path).with_context(|| format!("cannot open the embedding model {path}"))?;
    let folder = match (about.is_dir(), Path::new(path)) {
        (true, folder) if folder.join(ONNX_FILE).is_file() => folder,
        (false, file) if file.ends_with(ONNX_FILE) => file.parent().context("a file lies in a folder")?,
        _ => bail!("{path} is no embedding model: name a folder with a {ONNX_FILE} in it, or that file"),
    };
    Ok(folder.to_owned())
}

/// What a file says of itself.
fn read_gguf_model(path: PathBuf, bytes: u64) -> InstalledModel {
    let header = match gguf::read_header(&path) {
        Ok(header) => header,
        Err(error) => return unusable_model(path, bytes, error.to_string()),
    };
    let kind = model_kind(&header);
    let reason = match kind {
        ModelKind::Chat => header.kv_edit_unsupported().map(str::to_owned),
        ModelKind::Embedding => Some("it does not speak: it has no window".into()),
    };
    InstalledModel {
        name: String::new(),
        kind,
        path,
        bytes,
        quantisation: quantization_name(&header).map(str::to_owned),
        context: match header.arch_value("context_length") {
            Some(GgufValue::Int(n)) => u64::try_from(*n).ok(),
            _ => None,
        },
        architecture: header.architecture().map(str::to_owned),
        no_kv_edit_reason: reason,
        problem: unusable_reason(&header),
    }
}

fn unusable_model(path: PathBuf, bytes: u64, problem: String) -> InstalledModel {
    InstalledModel {
        name: String::new(),
        kind: ModelKind::Chat,
        path,
        bytes,
        quantisation: None,
        context: None,
        architecture: None,
        no_kv_edit_reason: Some("it cannot be used".into()),
        problem: Some(problem),
    }
}

/// Why a sound file is no model to load by itself.
pub fn unusable_reason(header: &GgufHeader) -> Option<String> {
    let text = |key: &str| match header.metadata.get(key) {
        Some(GgufValue::Text(text)) => text.as_str(),
        _ => "",
    };
    let parts = match header.metadata.get("split.count") {
        Some(GgufValue::Int(n)) if *n > 1 => *n,
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
fn model_kind(header: &GgufHeader) -> ModelKind {
    let name = header.architecture().unwrap_or_default();
    let encodes = name.contains("bert") || ["t5encoder", "gemma-embedding", "llama-embed"].contains(&name);
    let pools = matches!(header.arch_value("pooling_type"), Some(GgufValue::Int(1..=4)));
    if encodes || pools { ModelKind::Embedding } else { ModelKind::Chat }
}

/// How most of its numbers are kept, by the name that such files bear.
fn quantization_name(header: &GgufHeader) -> Option<&'static str> {
    let Some(GgufValue::Int(kind)) = header.metadata.get("general.file_type") else { return None };
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
fn strip_gguf_extension(file: &str) -> &str {
    let cut = file.len().saturating_sub(".gguf".len());
    match file.get(cut..) {
        Some(end) if cut > 0 && end.eq_ignore_ascii_case(".gguf") => &file[..cut],
        _ => file,
    }
}

/// What else could be taken instead.
fn installed_models_hint(here: &[InstalledModel]) -> String {
    let names: Vec<_> = here
        .iter()
        .filter(|m| m.kind == ModelKind::Chat && m.problem.is_none())
        .map(|m| m.name.as_str())
        .take(5)
        .collect();
    if names.is_empty() { String::new() } else { format!("; here are: {}", names.join(", ")) }
}

/// The names that are most like one that nobody knows, at most three, if any is like it at all.
fn closest_names<'a>(text: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
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
    fn models_suggest_closest_names() {
        let known = ["smollm2", "minilm", "qwen2.5-coder-1.5b"];
        for (text, near) in [
            ("smolm2", &["smollm2"][..]),
            ("QWEN", &["qwen2.5-coder-1.5b"]),
            ("minillm", &["minilm"]),
            ("zzz", &[]),
            ("", &[]),
        ] {
            assert_eq!(closest_names(text, known.into_iter()), near, "{text}");
        }
    }

    #[test]
    fn embedder_is_found_by_name_and_path() {
        let folder = tempfile::tempdir().expect("made");
        let models =
            ModelLibrary { folder: folder.path().to_owned(), catalogue: Catalogue::load().expect("sound") };
        let fails = |name: &str| models.find_embedder(Some(name)).expect_err(name).to_string();
        assert_eq!(models.find_embedder(None).expect("nothing is wrong"), None);
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
        for file in &models.catalogue.default_embedder().expect("there").files {
            let path = folder.path().join(&file.name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::File::create(path).and_then(|made| made.set_len(file.bytes)).expect("made");
        }
        let place = folder.path().join("e5-small");
        let (at, file) = (place.display().to_string(), place.join(ONNX_FILE).display().to_string());
        for name in [None, Some("e5-small"), Some(at.as_str()), Some(file.as_str())] {
            assert_eq!(models.find_embedder(name).expect("here"), Some(place.clone()), "{name:?}");
        }
        for path in [folder.path().display().to_string(), place.join("config.json").display().to_string()] {
            assert!(fails(&path).contains("name a folder with a model.onnx in it"), "{}", fails(&path));
        }
        fs::remove_file(place.join("tokenizer.json")).expect("removed");
        for wreck in [None, Some("e5-small")] {
            let said = models.find_embedder(wreck).expect_err("a file is missing").to_string();
            assert!(
                said.contains("tokenizer.json is missing; `halo models pull e5-small` fetches it"),
                "{said}"
            );
        }
    }

    #[test]
    fn gguf_extension_is_stripped() {
        for (file, name) in
            [("a.b.gguf", "a.b"), ("A.GGUF", "A"), (".gguf", ".gguf"), ("é", "é"), ("x.bin", "x.bin")]
        {
            assert_eq!(strip_gguf_extension(file), name);
        }
    }
}
