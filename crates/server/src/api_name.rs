//! The API that a path belongs to.

/// The API that a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ApiName {
    Halo,
    OpenAi,
    Kobold,
    Ollama,
    LlamaServer,
    Mcp,
    /// The page, and everything else.
    Page,
}

const KOBOLD_PREFIXES: [&str; 5] = ["/api/v1/", "/api/latest/", "/api/extra/", "/api/admin/", "/sdapi/"];

impl ApiName {
    /// Whether it is the API of another program, whose front ends may be pages of this machine.
    pub fn is_foreign(self) -> bool {
        matches!(self, Self::OpenAi | Self::Kobold | Self::Ollama | Self::LlamaServer)
    }

    pub fn of_path(path: &str) -> Self {
        match path {
            _ if path.starts_with("/api/halo/") => Self::Halo,
            _ if KOBOLD_PREFIXES.iter().any(|prefix| path.starts_with(prefix)) => Self::Kobold,
            _ if path.starts_with("/api/") => Self::Ollama,
            _ if path == "/v1" || path.starts_with("/v1/") => Self::OpenAi,
            "/chat/completions" | "/models" => Self::OpenAi,
            _ if is_llama_server_path(path) => Self::LlamaServer,
            "/mcp" => Self::Mcp,
            _ => Self::Page,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Halo => "halo",
            Self::OpenAi => "openai",
            Self::Kobold => "kobold",
            Self::Ollama => "ollama",
            Self::LlamaServer => "llama_server",
            Self::Mcp => "mcp",
            Self::Page => "page",
        }
    }
}

/// The routes of llama-server. They are in the root of the server, and need the key like all other APIs.
const LLAMA_SERVER_PATHS: [&str; 14] = [
    "/props",
    "/slots",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/completion",
    "/completions",
    "/embedding",
    "/embeddings",
    "/infill",
    "/rerank",
    "/reranking",
    "/lora-adapters",
    "/slots/",
];

fn is_llama_server_path(path: &str) -> bool {
    LLAMA_SERVER_PATHS.contains(&path) || path.starts_with("/slots/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_server_paths_are_known() {
        for path in ["/props", "/slots", "/slots/0", "/completion", "/embeddings", "/rerank"] {
            assert!(is_llama_server_path(path), "{path}");
        }
        for path in ["/", "/propsx", "/app.css", "/health", "/metrics"] {
            assert!(!is_llama_server_path(path), "{path}");
        }
    }
}
