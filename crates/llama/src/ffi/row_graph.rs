//! The small graph that computes attention rows from kept queries: keys times queries, softmax, mean over heads and layers.

use super::error::LlamaError;
use super::query_capture::{LayerScores, RowResult, Scoring, TensorView};
use llama_cpp_sys_2 as sys;
use std::ptr::NonNull;

/// The most bytes of attention scores that a graph holds at once; more layers are computed one after the other.
const SCORE_BYTES: usize = 256 << 20;

/// One layer of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct GraphLayer {
    pub(super) layer: usize,
    pub(super) keys: TensorView,
    pub(super) heads: i64,
    pub(super) queries: *mut u8,
    pub(super) query_buffer: sys::ggml_backend_buffer_t,
    pub(super) head_stride: usize,
    pub(super) scoring: Scoring,
    pub(super) sinks: Option<TensorView>,
    pub(super) mask: TensorView,
}

impl GraphLayer {
    /// The distance to a layer that one matrix product can compute together with this one: from keys to keys, and from
    /// queries to queries.
    fn distance(&self, next: &GraphLayer) -> Option<(usize, usize)> {
        let same = self.keys.kind == next.keys.kind
            && self.keys.ne == next.keys.ne
            && self.keys.nb == next.keys.nb
            && self.keys.buffer == next.keys.buffer
            && self.query_buffer == next.query_buffer
            && (self.heads, self.head_stride) == (next.heads, next.head_stride)
            && self.scoring == next.scoring
            && self.mask == next.mask
            // Sinks differ from layer to layer.
            && self.sinks.is_none()
            && next.sinks.is_none();
        let keys = (next.keys.data as usize).checked_sub(self.keys.data as usize);
        let queries = (next.queries as usize).checked_sub(self.queries as usize);
        // The backends divide strides by the size of a number, or of a block of quantised ones, so a distance is a whole number
        // of them. It is also a multiple of the alignment of vector loads.
        // SAFETY: the type is that of a live tensor.
        let block_bytes = unsafe { sys::ggml_type_size(self.keys.kind) };
        let whole = |distance: usize, size: usize| {
            distance > 0 && distance.is_multiple_of(16) && distance.is_multiple_of(size)
        };
        let (keys, queries) = (keys?, queries?);
        (same && whole(keys, block_bytes) && whole(queries, 4)).then_some((keys, queries))
    }

    /// The bytes of the scores of all heads.
    fn score_bytes(&self) -> usize {
        usize::try_from(self.keys.ne[1] * self.heads).unwrap_or(usize::MAX).saturating_mul(4)
    }
}

/// Layers that are computed as one.
struct LayerRun<'a> {
    layers: &'a [GraphLayer],
    key_distance: usize,
    query_distance: usize,
}

/// Splits layers into runs at equal distances.
fn layer_runs(layers: &[GraphLayer], merge: bool) -> Vec<LayerRun<'_>> {
    let mut runs = Vec::new();
    let mut start = 0;
    while start < layers.len() {
        let first = &layers[start];
        let most = (SCORE_BYTES / first.score_bytes().max(1)).max(1);
        let distance = layers.get(start + 1).filter(|_| merge).and_then(|next| first.distance(next));
        let mut end = start + 1;
        if distance.is_some() {
            while end < layers.len()
                && end - start < most
                && layers[end - 1].distance(&layers[end]) == distance
            {
                end += 1;
            }
        }
        let (key_distance, query_distance) = distance.unwrap_or((0, 0));
        runs.push(LayerRun { layers: &layers[start..end], key_distance, query_distance });
        start = end;
    }
    runs
}

/// What a small graph computes for one token on one device.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct GraphJob {
    pub(super) heads: bool,
    /// The layers of the row on all devices.
    pub(super) layer_count: usize,
    pub(super) layers: Vec<GraphLayer>,
}

/// A ggml context for the nodes of one graph.
struct NodeMemory(NonNull<sys::ggml_context>);

impl Drop for NodeMemory {
    fn drop(&mut self) {
        // SAFETY: freed once; no tensor of it is used afterwards.
        unsafe { sys::ggml_free(self.0.as_ptr()) };
    }
}

/// The memory of the intermediate tensors.
pub(super) struct GraphAllocator(NonNull<sys::ggml_gallocr>);

impl Drop for GraphAllocator {
    fn drop(&mut self) {
        // SAFETY: freed once, with its buffers, which no graph uses afterwards.
        unsafe { sys::ggml_gallocr_free(self.0.as_ptr()) };
    }
}

/// A tensor that is read after the graph ran.
struct GraphOutput {
    job: usize,
    /// The layer of an output with all heads.
    layer: Option<usize>,
    cells: usize,
    len: usize,
    tensor: *mut sys::ggml_tensor,
}

/// The small graph of one device.
pub(super) struct SmallGraph {
    pub(super) jobs: Vec<GraphJob>,
    graph: *mut sys::ggml_cgraph,
    outputs: Vec<GraphOutput>,
    // Dropped in this order.
    allocator: GraphAllocator,
    nodes: NodeMemory,
}

/// Nodes of one run of layers, at most.
const NODES_PER_RUN: usize = 24;

impl SmallGraph {
    pub(super) fn into_allocator(self) -> GraphAllocator {
        drop(self.nodes);
        self.allocator
    }

    pub(super) fn build(
        backend: NonNull<sys::ggml_backend>,
        buffer_type: sys::ggml_backend_buffer_type_t,
        jobs: Vec<GraphJob>,
        allocator: Option<GraphAllocator>,
    ) -> Result<Self, LlamaError> {
        let no_memory = || LlamaError::Decode("no memory for the graph that computes attention rows".into());
        let layers: usize = jobs.iter().map(|job| job.layers.len()).sum();
        let size = layers * NODES_PER_RUN + 64;
        // SAFETY: a context without data: only the nodes are in its memory, for which there is room.
        let nodes = unsafe {
            let overhead = sys::ggml_tensor_overhead() * size + sys::ggml_graph_overhead_custom(size, false);
            let params = sys::ggml_init_params {
                mem_size: overhead + 4096,
                mem_buffer: std::ptr::null_mut(),
                no_alloc: true,
            };
            NonNull::new(sys::ggml_init(params)).map(NodeMemory).ok_or_else(no_memory)?
        };
        // SAFETY: the context is alive and has room for the graph.
        let graph = unsafe { sys::ggml_new_graph_custom(nodes.0.as_ptr(), size, false) };
        let mut builder = GraphBuilder {
            context: nodes.0.as_ptr(),
            backend,
            graph,
            outputs: Vec::new(),
            constants: Vec::new(),
        };
        for (n, job) in jobs.iter().enumerate() {
            builder.add_job(n, job);
        }
        let GraphBuilder { outputs, constants, .. } = builder;
        let allocator = match allocator {
            Some(allocator) => allocator,
            // SAFETY: the buffer type belongs to the backend, and types are never freed.
            None => NonNull::new(unsafe { sys::ggml_gallocr_new(buffer_type) })
                .map(GraphAllocator)
                .ok_or_else(no_memory)?,
        };
        // SAFETY: the graph and the allocator are alive.
        if !unsafe { sys::ggml_gallocr_alloc_graph(allocator.0.as_ptr(), graph) } {
            return Err(no_memory());
        }
        for Constant { tensor, len, value } in constants {
            let values = vec![value; len];
            // SAFETY: the tensor was allocated with `len` floats, and is never overwritten: it is marked as an output.
            unsafe { sys::ggml_backend_tensor_set(tensor, values.as_ptr().cast(), 0, len * 4) };
        }
        Ok(Self { jobs, graph, outputs, allocator, nodes })
    }

    pub(super) fn compute(
        &self,
        backend: NonNull<sys::ggml_backend>,
        results: &mut [RowResult],
    ) -> Result<(), LlamaError> {
        // SAFETY: the graph is allocated, and what it reads is alive: keys, queries and masks of the last batch.
        let status = unsafe { sys::ggml_backend_graph_compute(backend.as_ptr(), self.graph) };
        if status != sys::GGML_STATUS_SUCCESS {
            return Err(LlamaError::Decode(format!(
                "the graph that computes attention rows failed: {status}"
            )));
        }
        for output in &self.outputs {
            let mut values = vec![0.0f32; output.len];
            // SAFETY: the tensor is an output of the graph and has `len` floats.
            unsafe {
                sys::ggml_backend_tensor_get(output.tensor, values.as_mut_ptr().cast(), 0, output.len * 4);
            };
            let Some(result) = results.get_mut(output.job) else { continue };
            match output.layer {
                Some(layer) => result.layers.push(LayerScores { layer, cells: output.cells, values }),
                None => {
                    result.mean.resize(values.len().max(result.mean.len()), 0.0);
                    result.mean.iter_mut().zip(&values).for_each(|(sum, a)| *sum += a);
                }
            }
        }
        Ok(())
    }
}

struct Constant {
    tensor: *mut sys::ggml_tensor,
    len: usize,
    value: f32,
}

struct GraphBuilder {
    context: *mut sys::ggml_context,
    backend: NonNull<sys::ggml_backend>,
    graph: *mut sys::ggml_cgraph,
    outputs: Vec<GraphOutput>,
    constants: Vec<Constant>,
}

impl GraphBuilder {
    /// A tensor of the graph whose data is that of another tensor.
    fn alias(&mut self, view: &TensorView) -> *mut sys::ggml_tensor {
        let [a, b, c, d] = view.ne;
        // SAFETY: the context has room for the nodes of all jobs. The data is valid: the tensors that it comes from live as
        // long as the graph is used.
        unsafe {
            let tensor = sys::ggml_new_tensor_4d(self.context, view.kind, a, b, c, d);
            (*tensor).nb = view.nb;
            (*tensor).data = view.data.cast();
            (*tensor).buffer = view.buffer;
            tensor
        }
    }

    fn add_job(&mut self, number: usize, job: &GraphJob) {
        let mut row: *mut sys::ggml_tensor = std::ptr::null_mut();
        let mut cells = 0;
        for run in layer_runs(&job.layers, !job.heads) {
            let Some(first) = run.layers.first() else { continue };
            let layers = i64::try_from(run.layers.len()).unwrap_or(0);
            let scores = self.attention(first, layers, &run);
            cells = usize::try_from(first.keys.ne[1]).unwrap_or(0);
            let heads = usize::try_from(first.heads).unwrap_or(0);
            if job.heads {
                let output = GraphOutput {
                    job: number,
                    layer: Some(first.layer),
                    cells,
                    len: cells * heads,
                    tensor: scores,
                };
                self.add_output(output);
                continue;
            }
            let sum = self.weighted_sum(scores, first, layers, 1.0 / (heads * job.layer_count) as f32);
            // SAFETY: both are rows of the same length in the same context.
            row = if row.is_null() { sum } else { unsafe { sys::ggml_add(self.context, row, sum) } };
        }
        if !row.is_null() {
            self.add_output(GraphOutput { job: number, layer: None, cells, len: cells, tensor: row });
        }
    }

    fn add_output(&mut self, output: GraphOutput) {
        // SAFETY: the tensor is a node of this context; the graph has room.
        unsafe {
            sys::ggml_set_output(output.tensor);
            sys::ggml_build_forward_expand(self.graph, output.tensor);
        }
        self.outputs.push(output);
    }

    /// The attention of all heads of the layers of a run: `[cells, 1, heads, layers]`.
    fn attention(&mut self, first: &GraphLayer, layers: i64, run: &LayerRun<'_>) -> *mut sys::ggml_tensor {
        let [size, cells, key_heads, _] = first.keys.ne;
        let group = first.heads / key_heads;
        let mut keys = first.keys;
        keys.ne[3] = layers;
        if layers > 1 {
            keys.nb[3] = run.key_distance;
        }
        // The heads that share a key head are the columns of one matrix, so that each key is read once.
        let group_stride = first.head_stride * usize::try_from(group).unwrap_or(0);
        let all_heads = group_stride * usize::try_from(key_heads).unwrap_or(0);
        let queries = TensorView {
            kind: sys::GGML_TYPE_F32,
            ne: [size, group, key_heads, layers],
            nb: [4, first.head_stride, group_stride, if layers > 1 { run.query_distance } else { all_heads }],
            data: first.queries,
            buffer: first.query_buffer,
        };
        let (keys, queries, mask) = (self.alias(&keys), self.alias(&queries), self.alias(&first.mask));
        let sinks = first.sinks.map(|sinks| self.alias(&sinks));
        let Scoring { scale, max_bias, soft_cap } = first.scoring;
        // SAFETY: the context has room for these nodes, and their shapes fit each other, checked by `FlashOperands::of`.
        unsafe {
            let mut scores = sys::ggml_mul_mat(self.context, keys, queries);
            sys::ggml_prec_set_acc(scores, sys::GGML_PREC_F32);
            let mut scale = scale;
            if soft_cap != 0.0 {
                scores = sys::ggml_scale(self.context, scores, scale / soft_cap);
                scores = sys::ggml_tanh(self.context, scores);
                scores = sys::ggml_scale(self.context, scores, soft_cap);
                scale = 1.0;
            }
            let scores = sys::ggml_reshape_4d(self.context, scores, cells, 1, first.heads, layers);
            let attention = sys::ggml_soft_max_ext(self.context, scores, mask, scale, max_bias);
            if let Some(sinks) = sinks {
                sys::ggml_soft_max_add_sinks(attention, sinks);
            }
            attention
        }
    }

    /// The sum over heads and layers, times a weight: one number per cell.
    fn weighted_sum(
        &mut self,
        attention: *mut sys::ggml_tensor,
        first: &GraphLayer,
        layers: i64,
        weight: f32,
    ) -> *mut sys::ggml_tensor {
        let (cells, rows) = (first.keys.ne[1], first.heads * layers);
        let len = usize::try_from(rows).unwrap_or(0);
        let known = |known: &&Constant| known.len == len && known.value.to_bits() == weight.to_bits();
        let known = self.constants.iter().find(known).map(|known| known.tensor);
        // SAFETY: the context has room for these nodes, and their shapes fit each other. An input that is an output too is not
        // overwritten by later nodes.
        unsafe {
            let weights = known.unwrap_or_else(|| {
                let tensor = sys::ggml_new_tensor_2d(self.context, sys::GGML_TYPE_F32, 1, rows);
                sys::ggml_set_input(tensor);
                sys::ggml_set_output(tensor);
                tensor
            });
            let rows = sys::ggml_reshape_2d(self.context, attention, cells, rows);
            let sum = sys::ggml_out_prod(self.context, rows, weights);
            if sys::ggml_backend_supports_op(self.backend.as_ptr(), sum) {
                if known.is_none() {
                    self.constants.push(Constant { tensor: weights, len, value: weight });
                }
                return sum;
            }
            let by_cell = sys::ggml_cont(self.context, sys::ggml_transpose(self.context, rows));
            let sum = sys::ggml_scale(self.context, sys::ggml_sum_rows(self.context, by_cell), weight);
            sys::ggml_reshape_2d(self.context, sum, cells, 1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(kind: sys::ggml_type, key_address: usize, query_address: usize) -> GraphLayer {
        let view = |data: usize| TensorView {
            kind,
            ne: [64, 256, 3, 1],
            nb: [2, 204, 68, 52_224],
            data: std::ptr::without_provenance_mut(data),
            buffer: std::ptr::null_mut(),
        };
        GraphLayer {
            layer: 0,
            keys: view(key_address),
            heads: 9,
            queries: std::ptr::without_provenance_mut(query_address),
            query_buffer: std::ptr::null_mut(),
            head_stride: 256,
            scoring: Scoring { scale: 0.125, max_bias: 0.0, soft_cap: 0.0 },
            sinks: None,
            mask: view(0),
        }
    }

    /// A distance that is no whole number of blocks would be cut off, and the keys of another place read.
    #[test]
    fn layers_are_merged_only_at_whole_blocks() {
        let distance =
            |kind, keys: usize| layer(kind, 4096, 4096).distance(&layer(kind, 4096 + keys, 4096 + 2304));
        assert_eq!(distance(sys::GGML_TYPE_F16, 4096), Some((4096, 2304)));
        assert_eq!(distance(sys::GGML_TYPE_Q8_0, 4096), None);
        assert_eq!(distance(sys::GGML_TYPE_Q8_0, 34 * 128), Some((34 * 128, 2304)));
        assert_eq!(distance(sys::GGML_TYPE_Q4_0, 34 * 128), None);
        assert_eq!(distance(sys::GGML_TYPE_Q4_0, 18 * 128), Some((18 * 128, 2304)));
        assert_eq!(distance(sys::GGML_TYPE_F16, 0), None);
    }
}
