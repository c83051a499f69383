//! The models folder: GGUF files of any origin, and a catalogue of models that can be downloaded into it.

pub mod catalogue;

use crate::script_model::script_file;
use anyhow::{Context, Result, bail};
use catalogue::{Catalogue, CatalogueEntry, ModelKind};
use halo_llama::gguf::{self, GgufHeader, GgufValue};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The file that identifies an embedding model; its tokenizer and config are beside it.
const ONNX_FILE: &str = "model.onnx";

const EMBEDDER_HINT: &str = "`halo models` lists embedding models, and `halo models pull` downloads one";

/// A model file in the models folder, usable or not.
#[derive(Clone, Debug)]
pub struct InstalledModel {
    /// The name in the catalogue, or the file name.
    pub name: String,
    pub kind: ModelKind,
    pub path: PathBuf,
    pub bytes: u64,
    pub quantisation: Option<String>,
    /// The context length that the model was trained for.
    pub context: Option<u64>,
    pub architecture: Option<String>,
    /// Whether the file has a chat template.
    pub has_template: bool,
    /// Whether attention can be read, which pruning by attention needs.
    pub has_attention: bool,
    /// The memory that it needs: the file, and the KV cells of its context.
    pub memory_bytes: u64,
    /// Why KV cells cannot be edited; none if they can, as far as the file tells.
    pub no_kv_edit_reason: Option<String>,
    /// Why the model cannot be used.
    pub problem: Option<String>,
}

/// The models folders and the catalogue.
pub struct ModelLibrary {
    /// Downloads go here, and its models come first.
    pub folder: PathBuf,
    /// The models of the data folder that is used without --data, if that is another one.
    pub installed_folder: Option<PathBuf>,
    pub catalogue: Catalogue,
}

/// Whether a text is a path and not a name.
pub fn is_path(text: &str) -> bool {
    text.contains(std::path::is_separator)
}

impl ModelLibrary {
    /// The models of a data folder, and those of the one that is used without --data.
    pub fn open(data_dir: &Path, installed_data_dir: Option<&Path>) -> Result<Self> {
        let installed_folder =
            installed_data_dir.filter(|dir| *dir != data_dir).map(|dir| dir.join("models"));
        Ok(Self { folder: data_dir.join("models"), installed_folder, catalogue: Catalogue::load()? })
    }

    /// The file of a model, by name or path; the default chat model where none is named. A path has a separator in it
    /// (`./model.gguf`), so that a file in the working directory never shadows the name of a model.
    pub fn find_model_file(&self, name: Option<&str>) -> Result<PathBuf> {
        match name {
            Some(address) if halo_remote::RemoteModel::is_address(address) => {
                bail!("{address} is a server, and this needs a local model: `halo models` lists those")
            }
            Some(script) if script_file(script).is_some() => {
                bail!("{script} is a script, and this needs a local model: `halo models` lists those")
            }
            Some(url) if catalogue::is_http_url(url) => bail!("download it first: `halo models pull {url}`"),
            Some(path) if is_path(path) => match fs::metadata(path) {
                Ok(metadata) if metadata.is_dir() => {
                    bail!("{path} is a folder: name the model file in it")
                }
                Ok(metadata) if !metadata.is_file() => {
                    bail!("{path} is a pipe or a device: name a model file")
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

    /// All installed models, by name. A model in the folder itself hides one of the same name in the other.
    pub fn installed(&self) -> Result<Vec<InstalledModel>> {
        let mut models = self.models_in(&self.folder)?;
        if let Some(folder) = &self.installed_folder {
            // A folder that cannot be read is no error here: the user may have named another one because of that.
            let others = self.models_in(folder).unwrap_or_default();
            let is_new = |other: &InstalledModel| {
                !models
                    .iter()
                    .any(|model: &InstalledModel| model.name == other.name && model.problem.is_none())
            };
            let others: Vec<InstalledModel> =
                others.into_iter().filter(|other| other.problem.is_none() && is_new(other)).collect();
            models.retain(|model| !others.iter().any(|other| other.name == model.name));
            models.extend(others);
        }
        models.sort_by(|a, b| (&a.name, &a.path).cmp(&(&b.name, &b.path)));
        Ok(models)
    }

    fn models_in(&self, folder: &Path) -> Result<Vec<InstalledModel>> {
        let failed = || format!("cannot read the models folder {}", folder.display());
        let mut models = Vec::new();
        match fs::read_dir(folder) {
            Ok(files) => {
                for file in files {
                    let name = file.with_context(failed)?.file_name();
                    models.extend(self.inspect_file(&name.to_string_lossy(), folder.join(&name)));
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(failed),
        }
        let entries = self.catalogue.models.iter();
        models.extend(entries.filter_map(|entry| inspect_multi_file_model(folder, entry)));
        Ok(models)
    }

    /// The file of an installed model.
    fn find_by_name(&self, name: &str) -> Result<PathBuf> {
        let installed = self.installed()?;
        let file = |m: &InstalledModel| {
            m.path.file_name().map(|f| f.to_string_lossy().into_owned()).unwrap_or_default()
        };
        let model = installed
            .iter()
            .find(|m| m.name == name)
            .or_else(|| installed.iter().find(|m| file(m) == name || strip_gguf_extension(&file(m)) == name));
        match model {
            Some(InstalledModel { problem: Some(problem), .. }) => bail!("{name} cannot be used: {problem}"),
            Some(model) => Ok(model.path.clone()),
            None if self.catalogue.get(name).is_some() => {
                bail!(
                    "{name} is not installed: `halo models pull {name}` downloads it{}",
                    installed_models_hint(&installed)
                )
            }
            None => bail!("{}", self.unknown_model_message(name, &installed)),
        }
    }

    /// The folder of an embedding model, which holds its `model.onnx`, by name or path (of the folder or the file). The
    /// default embedder where none is named; none if that is not installed.
    pub fn find_embedder(&self, name: Option<&str>) -> Result<Option<PathBuf>> {
        if let Some(path) = name.filter(|name| is_path(name)) {
            return embedder_dir_at(path).map(Some);
        }
        let Some(wanted_name) = name.or(self.catalogue.default_embedder().map(|entry| entry.name.as_str()))
        else {
            return Ok(None);
        };
        let installed = self.installed()?;
        match installed.iter().find(|m| m.name == wanted_name) {
            Some(InstalledModel { problem: Some(problem), .. }) => {
                bail!("{wanted_name} cannot be used: {problem}")
            }
            Some(InstalledModel { path, .. }) if path.ends_with(ONNX_FILE) => {
                Ok(path.parent().map(Path::to_owned))
            }
            Some(InstalledModel { kind: ModelKind::Chat, .. }) => {
                bail!("{}", not_an_embedder_message(wanted_name))
            }
            Some(_) => {
                bail!(
                    "{wanted_name} is not a folder with a {ONNX_FILE} in it, and cannot be used: {EMBEDDER_HINT}"
                )
            }
            None if name.is_none() => Ok(None),
            None => match self.catalogue.get(wanted_name).map(|entry| entry.kind) {
                Some(ModelKind::Embedding) => {
                    bail!("{wanted_name} is not installed: `halo models pull {wanted_name}` downloads it")
                }
                Some(ModelKind::Chat) => bail!("{}", not_an_embedder_message(wanted_name)),
                None => bail!("{}", self.unknown_model_message(wanted_name, &installed)),
            },
        }
    }

    /// The message for an unknown name.
    pub fn unknown_model_message(&self, name: &str, installed: &[InstalledModel]) -> String {
        let all = installed
            .iter()
            .map(|m| m.name.as_str())
            .chain(self.catalogue.models.iter().map(|e| e.name.as_str()));
        let closest = closest_names(name, all);
        let advice = match closest.as_slice() {
            [] => {
                "`halo models` lists installed models and those that `halo models pull` downloads".to_owned()
            }
            [one] => {
                format!("did you mean {one}? `halo models` lists all; `halo models pull NAME` downloads one")
            }
            [some @ .., last] => format!(
                "did you mean {} or {last}? `halo models` lists all; `halo models pull NAME` downloads one",
                some.join(", ")
            ),
        };
        let file = if Path::new(name).is_file() {
            format!("; to use the file of that name write ./{name}")
        } else {
            String::new()
        };
        format!("there is no model '{name}': {advice}{file}")
    }

    /// A file of the folder as a model; none if it is hidden or a folder.
    fn inspect_file(&self, file: &str, path: PathBuf) -> Option<InstalledModel> {
        if file.starts_with('.') {
            return None;
        }
        let mut model = match fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => return None,
            Ok(metadata) => read_gguf_model(path, metadata.len()),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                unusable_model(path, 0, "it is a link to a missing file".into())
            }
            Err(error) => unusable_model(path, 0, format!("it cannot be read: {error}")),
        };
        // A file with a catalogue name but another length is another model, unless it is damaged.
        let same = |e: &CatalogueEntry| e.files[0].bytes == model.bytes || model.problem.is_some();
        let is_catalogue_file = |e: &&CatalogueEntry| e.files[0].name == file && same(e);
        model.name = match self.catalogue.models.iter().find(is_catalogue_file) {
            Some(entry) => entry.name.clone(),
            None if self.catalogue.get(strip_gguf_extension(file)).is_some() => file.to_owned(),
            None => strip_gguf_extension(file).to_owned(),
        };
        Some(model)
    }
}

/// A model of several files, if its folder exists.
fn inspect_multi_file_model(folder: &Path, entry: &CatalogueEntry) -> Option<InstalledModel> {
    let main = folder.join(&entry.files[0].name);
    if entry.files[0].name.ends_with(".gguf") || !main.parent()?.is_dir() {
        return None;
    }
    let advice = format!("`halo models pull {}` downloads it", entry.name);
    let (mut bytes, mut problem) = (0, None);
    for file in &entry.files {
        let defect = match fs::metadata(folder.join(&file.name)).map(|metadata| metadata.len()) {
            Ok(len) => {
                bytes += len;
                (len != file.bytes)
                    .then(|| format!("{} is {len} bytes long and should be {}", file.name, file.bytes))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Some(format!("{} is missing", file.name)),
            Err(error) => Some(format!("{} cannot be read: {error}", file.name)),
        };
        problem = problem.or(defect.map(|defect| format!("{defect}; {advice}")));
    }
    Some(InstalledModel {
        name: entry.name.clone(),
        kind: entry.kind,
        path: main,
        bytes,
        quantisation: entry.quantisation.clone(),
        context: entry.context,
        architecture: entry.architecture.clone(),
        has_template: false,
        has_attention: false,
        memory_bytes: bytes,
        no_kv_edit_reason: Some("it is an embedding model without a context window".into()),
        problem,
    })
}

fn not_an_embedder_message(name: &str) -> String {
    format!("{name} is a chat model, not an embedding model: {EMBEDDER_HINT}")
}

/// The folder of an embedding model, from a path.
fn embedder_dir_at(path: &str) -> Result<PathBuf> {
    if path.contains("://") {
        bail!("{path} is a URL, but an embedding model must be local: {EMBEDDER_HINT}");
    }
    let metadata = fs::metadata(path).with_context(|| format!("cannot open the embedding model {path}"))?;
    let folder = match (metadata.is_dir(), Path::new(path)) {
        (true, folder) if folder.join(ONNX_FILE).is_file() => folder,
        (false, file) if metadata.is_file() && file.ends_with(ONNX_FILE) => {
            file.parent().context("a file lies in a folder")?
        }
        _ => bail!("{path} is not an embedding model: name a folder with a {ONNX_FILE} in it, or that file"),
    };
    Ok(folder.to_owned())
}

/// A model as its GGUF header describes it.
fn read_gguf_model(path: PathBuf, bytes: u64) -> InstalledModel {
    let header = match gguf::read_header(&path) {
        Ok(header) => header,
        Err(error) => return unusable_model(path, bytes, error.to_string()),
    };
    let kind = model_kind(&header);
    let reason = match kind {
        ModelKind::Chat => header.kv_edit_unsupported().map(str::to_owned),
        ModelKind::Embedding => Some("it is an embedding model without a context window".into()),
    };
    InstalledModel {
        name: String::new(),
        kind,
        path,
        bytes,
        quantisation: quantization_name(&header).map(str::to_owned),
        context: header.trained_context(),
        architecture: header.architecture().map(str::to_owned),
        has_template: header.has_chat_template(),
        has_attention: kind == ModelKind::Chat && header.attention_unsupported().is_none(),
        memory_bytes: memory_estimate(&header, None),
        no_kv_edit_reason: reason,
        problem: unusable_reason(&header),
    }
}

/// The memory that a model needs: the file, and the KV cells of its context (the trained one, at most 8,192 tokens, where none
/// is given).
pub fn memory_estimate(header: &GgufHeader, context: Option<u64>) -> u64 {
    let trained = || header.trained_context().unwrap_or(DEFAULT_CONTEXT).min(DEFAULT_CONTEXT);
    let cells = header.cell_bytes().saturating_mul(context.unwrap_or_else(trained));
    header.file_bytes.saturating_add(cells)
}

/// The longest context that `model.context = auto` chooses.
const DEFAULT_CONTEXT: u64 = 8192;

fn unusable_model(path: PathBuf, bytes: u64, problem: String) -> InstalledModel {
    InstalledModel {
        name: String::new(),
        kind: ModelKind::Chat,
        path,
        bytes,
        quantisation: None,
        context: None,
        architecture: None,
        has_template: false,
        has_attention: false,
        memory_bytes: bytes,
        no_kv_edit_reason: Some("it cannot be used".into()),
        problem: Some(problem),
    }
}

/// Why a valid GGUF file is no model by itself.
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
        ("adapter", _) => Some("it is an adapter (LoRA), not a model by itself".into()),
        ("mmproj", _) | (_, Some("clip")) => {
            Some("it is the multimodal projector of another model, not a model by itself".into())
        }
        ("imatrix", _) => Some("it is an importance matrix for quantization, not a model".into()),
        (_, None) => Some("it does not name its architecture".into()),
        _ if parts > 1 => {
            Some(format!("it is one of {parts} parts: join them with `llama-gguf-split --merge`"))
        }
        _ => None,
    }
}

fn model_kind(header: &GgufHeader) -> ModelKind {
    let name = header.architecture().unwrap_or_default();
    let encodes = name.contains("bert") || ["t5encoder", "gemma-embedding", "llama-embed"].contains(&name);
    let pools = matches!(header.arch_value("pooling_type"), Some(GgufValue::Int(1..=4)));
    if encodes || pools { ModelKind::Embedding } else { ModelKind::Chat }
}

/// The quantization of most tensors, by its usual name.
pub fn quantization_name(header: &GgufHeader) -> Option<&'static str> {
    let Some(GgufValue::Int(kind)) = header.metadata.get("general.file_type") else { return None };
    // A guessed type is marked by a bit.
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

/// A file name without `.gguf`.
fn strip_gguf_extension(file: &str) -> &str {
    let cut = file.len().saturating_sub(".gguf".len());
    match file.get(cut..) {
        Some(end) if cut > 0 && end.eq_ignore_ascii_case(".gguf") => &file[..cut],
        _ => file,
    }
}

/// Installed models that could be used instead.
fn installed_models_hint(installed: &[InstalledModel]) -> String {
    let names: Vec<_> = installed
        .iter()
        .filter(|m| m.kind == ModelKind::Chat && m.problem.is_none())
        .map(|m| m.name.as_str())
        .take(5)
        .collect();
    if names.is_empty() { String::new() } else { format!("; installed: {}", names.join(", ")) }
}

/// Up to three names that are similar enough to a misspelt one.
fn closest_names<'a>(text: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let text: String = text.chars().take(80).collect::<String>().to_lowercase();
    let likeness = |name: &str| {
        let name = name.to_lowercase();
        let inside = text.len() >= 3 && name.contains(&text);
        strsim::normalized_damerau_levenshtein(&text, &name).max(if inside { 0.9 } else { 0.0 })
    };
    let mut closest: Vec<_> =
        names.map(|name| (likeness(name), name)).filter(|(similarity, _)| *similarity >= 0.5).collect();
    closest.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    closest.dedup_by_key(|n| n.1);
    closest.into_iter().map(|(_, name)| name).take(3).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_suggest_closest_names() {
        let names = ["smollm2", "minilm", "qwen2.5-coder-1.5b"];
        for (text, closest) in [
            ("smolm2", &["smollm2"][..]),
            ("QWEN", &["qwen2.5-coder-1.5b"]),
            ("minillm", &["minilm"]),
            ("zzz", &[]),
            ("", &[]),
        ] {
            assert_eq!(closest_names(text, names.into_iter()), closest, "{text}");
        }
    }

    #[test]
    fn embedder_is_found_by_name_and_path() {
        let folder = tempfile::tempdir().expect("made");
        let models = ModelLibrary {
            folder: folder.path().to_owned(),
            installed_folder: None,
            catalogue: Catalogue::load().expect("sound"),
        };
        let fails = |name: &str| models.find_embedder(Some(name)).expect_err(name).to_string();
        assert_eq!(models.find_embedder(None).expect("nothing is wrong"), None);
        for (name, says) in [
            ("e5-small", "e5-small is not installed: `halo models pull e5-small` downloads it"),
            ("e5-smal", "there is no model 'e5-smal': did you mean e5-small?"),
            ("smollm2", "smollm2 is a chat model, not an embedding model"),
            ("http://host/e5", "http://host/e5 is a URL"),
            ("./nowhere", "cannot open the embedding model ./nowhere"),
        ] {
            assert!(fails(name).contains(says), "{}", fails(name));
        }
        // They are known by their length when they are listed, and checked when they are pulled and when they are loaded.
        for file in &models.catalogue.default_embedder().expect("there").files {
            let path = folder.path().join(&file.name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::File::create(path).and_then(|created| created.set_len(file.bytes)).expect("made");
        }
        let dir = folder.path().join("e5-small");
        let (at, file) = (dir.display().to_string(), dir.join(ONNX_FILE).display().to_string());
        for name in [None, Some("e5-small"), Some(at.as_str()), Some(file.as_str())] {
            assert_eq!(models.find_embedder(name).expect("here"), Some(dir.clone()), "{name:?}");
        }
        for path in [folder.path().display().to_string(), dir.join("config.json").display().to_string()] {
            assert!(fails(&path).contains("name a folder with a model.onnx in it"), "{}", fails(&path));
        }
        fs::remove_file(dir.join("tokenizer.json")).expect("removed");
        for wreck in [None, Some("e5-small")] {
            let message = models.find_embedder(wreck).expect_err("a file is missing").to_string();
            assert!(
                message.contains("tokenizer.json is missing; `halo models pull e5-small` downloads it"),
                "{message}"
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
