//! Models that a user can choose from.

use serde::Serialize;
use utoipa::ToSchema;

/// The model in use, and what else could be used.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct ModelChoices {
    /// The name of the model in use.
    pub current: String,
    /// Its file or address, as it was given at start; null for the default model.
    pub current_source: Option<String>,
    /// Chat models in the models folder.
    pub installed: Vec<InstalledModelChoice>,
    /// Chat models that can be downloaded and are not installed.
    pub downloadable: Vec<DownloadableModelChoice>,
    /// Memory that a model can use, in bytes; null if it is unknown.
    pub memory_bytes: Option<u64>,
    /// The embedder that can be downloaded, where there is none; it is used after a restart.
    pub downloadable_embedder: Option<DownloadableModelChoice>,
    /// How a model of the catalogue is downloaded: the command, with `MODEL` for the name.
    pub pull_command: String,
    /// How the model is changed: the command, with `MODEL` for the name, the file or the address.
    pub command: String,
}

/// A chat model in the models folder.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct InstalledModelChoice {
    pub name: String,
    pub bytes: u64,
    pub quantization: Option<String>,
    /// The context length that it was trained for.
    pub context: Option<u64>,
    /// The memory that it needs: the file, and the KV cells of its context.
    pub memory_bytes: u64,
    /// Whether it fits the memory of this machine; null if that is unknown.
    pub fits: Option<bool>,
    /// Whether it is in use.
    pub current: bool,
    /// Why it cannot be used.
    pub problem: Option<String>,
}

/// A model of the catalogue.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct DownloadableModelChoice {
    pub name: String,
    pub about: String,
    pub license: String,
    pub bytes: u64,
    /// How many bytes are downloaded.
    pub download_bytes: u64,
    pub fits: Option<bool>,
}

/// What a model server said of itself.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ModelServerReport {
    /// KoboldCPP, Ollama, LM Studio, llama-server, vLLM or OpenAI-compatible.
    pub kind: String,
    pub milliseconds: u64,
    /// Its models, each with the value of `--model` that selects it.
    pub models: Vec<RemoteModelChoice>,
}

/// A model of a server.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct RemoteModelChoice {
    pub name: String,
    /// The value of `--model`.
    pub address: String,
}

/// What a model needs beside its weights and KV cells: buffers of the computation, and the program.
const BUFFER_BYTES: u64 = 256 << 20;

/// Whether a model fits. `bytes` are those of its weights and KV cells.
#[must_use]
pub fn fits_memory(bytes: u64, memory: Option<u64>) -> Option<bool> {
    memory.map(|memory| bytes.saturating_add(bytes / 16).saturating_add(BUFFER_BYTES) <= memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_fits_with_room_for_its_buffers() {
        let gib = 1 << 30;
        assert_eq!(fits_memory(gib, Some(2 * gib)), Some(true));
        assert_eq!(fits_memory(gib, Some(gib + gib / 4)), Some(false));
        assert_eq!(fits_memory(gib, None), None);
        assert_eq!(fits_memory(u64::MAX, Some(gib)), Some(false));
    }
}
