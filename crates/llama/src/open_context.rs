//! Loads the weights of a model and creates its context, with as many layers on the GPU as its memory allows.

use crate::ffi::{ContextParams, LlamaContext, LlamaError, ModelWeights, free_gpu_bytes};
use crate::gguf::GgufHeader;
use crate::gpu_layers::{GpuLayers, GpuPlacement, LayerSizes, fallbacks};
use crate::kv_cache::{KvCacheMode, sequence_count};
use crate::model::LlamaOptions;
use crate::source_speed::fastest_source_of;
use crate::system_memory;
use std::path::Path;
use std::sync::Arc;

/// The share of free memory that the cells of further conversations may take.
const SHARED_CELLS_MEMORY: u64 = 4;

/// llama.cpp has 256 sequences, of which a conversation needs two.
const MAX_PARALLEL: u32 = 64;

const DEFAULT_MAX_CONTEXT: u32 = 8192;

pub(crate) struct OpenContext {
    pub weights: Arc<ModelWeights>,
    pub context: LlamaContext,
    /// The most tokens of one window with its answer.
    pub window: u32,
    /// Layers on the GPU.
    pub gpu_layers: u32,
    pub gpu_placement: Option<GpuPlacement>,
}

/// Opens the model with the layers on the GPU that the options say, and with fewer where that fails.
pub(crate) fn open_context(path: &Path, options: &LlamaOptions) -> Result<OpenContext, LlamaError> {
    let plan = GpuPlan::new(path, options)?;
    let mut counts = fallbacks(plan.layers).peekable();
    loop {
        let layers = counts.next().unwrap_or(0);
        let error = match open_with_layers(path, options, &plan, layers) {
            Ok(opened) => return Ok(opened),
            Err(error) => error,
        };
        match counts.peek() {
            Some(fewer) if error.may_be_short_memory() => tracing::warn!(
                "the model cannot be loaded with {layers} layers on the GPU: {error}. It is loaded with {fewer} layers there and \
                 will be slower; end other programs that use the GPU, or set model.gpu_layers or model.context lower"
            ),
            _ => return Err(error),
        }
    }
}

fn open_with_layers(
    path: &Path,
    options: &LlamaOptions,
    plan: &GpuPlan,
    layers: u32,
) -> Result<OpenContext, LlamaError> {
    let header = plan.header.clone();
    let weights = Arc::new(ModelWeights::load_checked(path, header, layers.cast_signed())?);
    let trained = weights.trained_context();
    let window = options.context.unwrap_or_else(|| trained.min(DEFAULT_MAX_CONTEXT));
    if window > trained {
        return Err(LlamaError::ContextTooLarge { requested: window, max: trained });
    }
    let edits = options.kv_mode == KvCacheMode::EditCells && weights.kv_edit_unsupported().is_none();
    let lanes = if edits { options.parallel.clamp(1, MAX_PARALLEL) } else { 1 };
    let tokens = shared_cells(&weights, window, lanes, layers);
    let threads = options.threads.max(1).cast_signed();
    let attention = options.attention.unwrap_or_else(|| {
        let run = (threads, options.kv_key_type, layers);
        fastest_source_of(&weights, path, options.self_tests.as_deref(), run)
    });
    let params = ContextParams {
        tokens,
        batch: options.batch.clamp(1, window.max(1)),
        threads,
        sequences: sequence_count(lanes),
        key_type: options.kv_key_type,
        attention,
    };
    let context = LlamaContext::new(&weights, params)?;
    let gpu_placement = plan.placement(layers, tokens);
    Ok(OpenContext { weights, context, window, gpu_layers: layers, gpu_placement })
}

/// The layers that are to be on the GPU.
struct GpuPlan {
    header: GgufHeader,
    sizes: LayerSizes,
    layers: u32,
    /// Free memory of the GPU, if one may be used.
    free: Option<u64>,
}

impl GpuPlan {
    fn new(path: &Path, options: &LlamaOptions) -> Result<Self, LlamaError> {
        let header = ModelWeights::read_header(path)?;
        let sizes = LayerSizes::of(&header);
        let free = if ModelWeights::gpu_is_usable() { free_gpu_bytes() } else { None };
        let trained = header.trained_context().and_then(|tokens| u32::try_from(tokens).ok());
        let window = options.context.or(trained.map(|trained| trained.min(DEFAULT_MAX_CONTEXT)));
        let layers = match (options.gpu_layers, free) {
            (GpuLayers::Auto, Some(free)) => sizes.most_that_fit(window.unwrap_or(DEFAULT_MAX_CONTEXT), free),
            (GpuLayers::Auto, None) => 0,
            (GpuLayers::Count(count), Some(_)) => count.min(sizes.count()),
            (GpuLayers::Count(count), None) => {
                if count > 0 {
                    tracing::warn!(
                        "model.gpu_layers is {count}, and this program has found no GPU that it was built for: the model runs on \
                         the CPU"
                    );
                }
                0
            }
        };
        Ok(Self { header, sizes, layers, free: free.filter(|_| options.gpu_layers.allows_gpu()) })
    }

    fn placement(&self, layers: u32, cells: u32) -> Option<GpuPlacement> {
        let free_bytes = self.free?;
        let (weight_bytes, cell_bytes) = self.sizes.gpu_bytes(layers, cells);
        Some(GpuPlacement { layers, all: self.sizes.count(), weight_bytes, cell_bytes, free_bytes })
    }
}

/// The cells of a context that generates several answers at once: as many as each of them may need, where memory is free.
fn shared_cells(weights: &ModelWeights, window: u32, lanes: u32, gpu_layers: u32) -> u32 {
    if lanes == 1 {
        return window;
    }
    let system = || system_memory::available_bytes().unwrap_or(0);
    let gpu = || free_gpu_bytes().unwrap_or(0);
    // The cells of a layer are where the layer is.
    let free = match gpu_layers as usize {
        0 => system(),
        layers if layers > weights.layer_count() => gpu(),
        _ => gpu().min(system()),
    } / SHARED_CELLS_MEMORY;
    let affordable = u32::try_from(free / weights.cell_bytes().max(1)).unwrap_or(u32::MAX);
    affordable.clamp(window, window.saturating_mul(lanes))
}
