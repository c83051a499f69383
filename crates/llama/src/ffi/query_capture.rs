//! Attention rows from queries that are kept while llama.cpp computes with flash attention.
//!
//! Flash attention computes no softmax that could be read. But its operands are all there: the keys are in the KV cache,
//! and the mask is an input of the graph. Only the queries are overwritten, because llama.cpp reuses their memory. So they
//! are kept, and after the batch a small graph of our own computes the row of a token from them: keys times queries, softmax,
//! mean over heads and layers. It runs on the device that holds the keys, on a backend of its own, and one row of numbers per
//! token is all that is copied to the host.
//!
//! Queries are kept in one of two ways:
//! - *In place*, for the few tokens of a step of generation: the tensor of the queries is pointed at memory of ours before
//!   the graph runs. The graph is not interrupted, and the pointer stays while llama.cpp reuses the graph.
//! - *Copied*, for the many tokens of a prefill, and wherever the first way is not safe: the graph is interrupted after the
//!   layer, and the queries of the tokens that a row is wanted of are copied on the device. On a CPU this costs next to
//!   nothing, so it is always done there.
//!
//! The small graph ([`row_graph`](super::row_graph)) is plain ggml. It is built again only when a shape or an address changes, and the layers whose keys lie at
//! equal distances, as llama.cpp allocates them, are computed as one matrix product.

use super::device::DeviceBuffer;
use super::error::LlamaError;
use super::node::GraphNode;
use super::row_graph::{GraphJob, GraphLayer, SmallGraph};
use llama_cpp_sys_2 as sys;
use std::ffi::c_void;
use std::ptr::NonNull;

/// Slots begin at multiples of this, which every backend's alignment divides.
const SLOT_ALIGN: usize = 256;

/// What the small graph computes for one token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RowJob {
    /// The index of the token in its batch.
    pub token: usize,
    /// The layers that the row is the mean of, among those kept.
    pub layers: Vec<usize>,
    /// Return every head of every layer instead of the mean.
    pub heads: bool,
}

/// The result of a [`RowJob`].
#[derive(Clone, Debug, Default)]
pub(crate) struct RowResult {
    /// The mean over heads and layers, by cell; empty for a job with heads.
    pub mean: Vec<f32>,
    pub layers: Vec<LayerScores>,
}

/// The attention of all heads of one layer for one token.
#[derive(Clone, Debug)]
pub(crate) struct LayerScores {
    pub layer: usize,
    pub cells: usize,
    pub values: Vec<f32>,
}

/// The queries of a batch, and the small graphs.
pub(crate) struct QueryCapture {
    threads: i32,
    /// The most tokens of a batch whose queries are kept in place.
    in_place_tokens: usize,
    /// Whether queries are kept in place where that is safe. None: on a GPU.
    in_place: Option<bool>,
    /// The layers of the model: each has a slot.
    layer_limit: usize,
    /// The tokens of the running batch that rows are wanted of, in ascending order.
    wanted: Vec<usize>,
    devices: Vec<CaptureDevice>,
    /// The layers of the running batch whose queries are kept, in graph order.
    layers: Vec<KeptLayer>,
    /// The masks of the running batch that were copied: where they were, and where the copies are.
    masks: Vec<KeptMask>,
    /// The nodes of the graph so far, for [`keep_in_place`](Self::keep_in_place).
    nodes: Vec<*mut sys::ggml_tensor>,
    /// The tensors whose data was moved in this batch.
    moved: Vec<*mut sys::ggml_tensor>,
}

// The pointers are used only while the context that owns the capture decodes, on one thread at a time.
// SAFETY: ggml's backends and buffers may be used on any thread, one thread at a time; `QueryCapture` is not `Sync`.
unsafe impl Send for QueryCapture {}

impl std::fmt::Debug for QueryCapture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueryCapture").field("layers", &self.layers.len()).finish_non_exhaustive()
    }
}

/// A tensor of llama.cpp's, described so that the small graph can read its data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TensorView {
    pub(super) kind: sys::ggml_type,
    pub(super) ne: [i64; 4],
    pub(super) nb: [usize; 4],
    pub(super) data: *mut u8,
    pub(super) buffer: sys::ggml_backend_buffer_t,
}

impl TensorView {
    fn of(tensor: &sys::ggml_tensor) -> Self {
        Self {
            kind: tensor.type_,
            ne: tensor.ne,
            nb: tensor.nb,
            data: tensor.data.cast(),
            buffer: tensor.buffer,
        }
    }

    /// A tensor outside of any graph, for copies.
    fn as_tensor(&self) -> sys::ggml_tensor {
        // SAFETY: the struct has numbers and pointers only, for which zero is valid.
        let mut tensor: sys::ggml_tensor = unsafe { std::mem::zeroed() };
        tensor.type_ = self.kind;
        tensor.ne = self.ne;
        tensor.nb = self.nb;
        tensor.data = self.data.cast();
        tensor.buffer = self.buffer;
        tensor
    }
}

/// How the scores of a layer become probabilities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scoring {
    pub(super) scale: f32,
    /// The largest bias of ALiBi, or 0.
    pub(super) max_bias: f32,
    /// The soft cap of the scores, or 0.
    pub(super) soft_cap: f32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct KeptLayer {
    layer: usize,
    device: usize,
    /// `[head size, cells, key heads, 1]`, permuted.
    keys: TensorView,
    heads: i64,
    /// The queries: where the first row is, and the bytes from one row and one head to the next.
    queries: *mut u8,
    query_buffer: sys::ggml_backend_buffer_t,
    row_stride: usize,
    head_stride: usize,
    /// Whether there is a row for every token of the batch, not only for the wanted ones.
    has_all_tokens: bool,
    scoring: Scoring,
    sinks: Option<TensorView>,
    mask: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct KeptMask {
    source: *mut c_void,
    device: usize,
    kind: sys::ggml_type,
    cells: i64,
    data: *mut u8,
    buffer: sys::ggml_backend_buffer_t,
    row_bytes: usize,
}

/// What the capture has on one device.
struct CaptureDevice {
    device: sys::ggml_backend_dev_t,
    buffer_type: sys::ggml_backend_buffer_type_t,
    is_cpu: bool,
    backend: NonNull<sys::ggml_backend>,
    /// Queries that are kept in place. Never reallocated: a graph that llama.cpp reuses points into it.
    in_place: Option<DeviceBuffer>,
    /// The bytes of one token's queries there, and of all tokens.
    in_place_row: usize,
    in_place_slot: usize,
    copies: Option<DeviceBuffer>,
    copies_used: usize,
    masks: Option<DeviceBuffer>,
    masks_used: usize,
    graph: Option<SmallGraph>,
}

impl Drop for CaptureDevice {
    fn drop(&mut self) {
        self.graph = None;
        // SAFETY: the backend is freed once, after its graph.
        unsafe { sys::ggml_backend_free(self.backend.as_ptr()) };
    }
}

impl CaptureDevice {
    fn open(device: sys::ggml_backend_dev_t, threads: i32) -> Option<Self> {
        // SAFETY: the device comes from a live buffer, and devices are never freed; null parameters are allowed.
        let backend = NonNull::new(unsafe { sys::ggml_backend_dev_init(device, std::ptr::null()) })?;
        // SAFETY: the device is never freed; the function that the name asks for has the type that ggml declares for it.
        let is_cpu = unsafe {
            let is_cpu = sys::ggml_backend_dev_type(device) == sys::GGML_BACKEND_DEVICE_TYPE_CPU;
            let reg = sys::ggml_backend_dev_backend_reg(device);
            let address = sys::ggml_backend_reg_get_proc_address(reg, c"ggml_backend_set_n_threads".as_ptr());
            if let Some(set_threads) =
                std::mem::transmute::<*mut c_void, sys::ggml_backend_set_n_threads_t>(address)
            {
                set_threads(backend.as_ptr(), threads);
            }
            is_cpu
        };
        // SAFETY: the device is alive.
        let buffer_type = unsafe { sys::ggml_backend_dev_buffer_type(device) };
        Some(Self {
            device,
            buffer_type,
            is_cpu,
            backend,
            in_place: None,
            in_place_row: 0,
            in_place_slot: 0,
            copies: None,
            copies_used: 0,
            masks: None,
            masks_used: 0,
            graph: None,
        })
    }

    /// Takes memory from one of the buffers that are refilled at every batch. A buffer grows only while nothing of this batch
    /// is in it.
    fn take(
        buffer: &mut Option<DeviceBuffer>,
        used: &mut usize,
        kind: sys::ggml_backend_buffer_type_t,
        bytes: usize,
        expected: usize,
    ) -> Option<(*mut u8, sys::ggml_backend_buffer_t)> {
        let bytes = bytes.next_multiple_of(SLOT_ALIGN);
        if *used == 0 && buffer.as_ref().is_none_or(|buffer| buffer.bytes < expected.max(bytes)) {
            *buffer = None;
            *buffer = DeviceBuffer::new(kind, expected.max(bytes).next_multiple_of(1 << 16));
        }
        let buffer = buffer.as_ref()?;
        if *used + bytes > buffer.bytes {
            return None;
        }
        // SAFETY: the offset is within the buffer, checked above.
        let data = unsafe { buffer.data.add(*used) };
        *used += bytes;
        Some((data, buffer.buffer.as_ptr()))
    }
}

/// The device that a buffer belongs to.
fn device_of(buffer: sys::ggml_backend_buffer_t) -> Option<sys::ggml_backend_dev_t> {
    if buffer.is_null() {
        return None;
    }
    // SAFETY: the buffer is that of a live tensor; devices are never freed. The buffers of the CPU name no device.
    let device = unsafe {
        let device = sys::ggml_backend_buft_get_device(sys::ggml_backend_buffer_get_type(buffer));
        if device.is_null() && sys::ggml_backend_buffer_is_host(buffer) {
            sys::ggml_backend_dev_by_type(sys::GGML_BACKEND_DEVICE_TYPE_CPU)
        } else {
            device
        }
    };
    (!device.is_null()).then_some(device)
}

/// Copies numbers that follow each other, on a device, to it or from it.
///
/// # Safety
/// Both pointers are within their buffers, with room for `len` numbers.
unsafe fn copy_flat(
    from: (*mut u8, sys::ggml_backend_buffer_t),
    to: (*mut u8, sys::ggml_backend_buffer_t),
    kind: sys::ggml_type,
    size: usize,
    len: i64,
) {
    let bytes = size * usize::try_from(len).unwrap_or(0);
    let flat = |(data, buffer)| TensorView {
        kind,
        ne: [len, 1, 1, 1],
        nb: [size, bytes, bytes, bytes],
        data,
        buffer,
    };
    let (from, mut to) = (flat(from).as_tensor(), flat(to).as_tensor());
    // SAFETY: the caller says that the ranges are valid; both tensors have the same layout.
    unsafe { sys::ggml_backend_tensor_copy(&raw const from, &raw mut to) };
}

impl QueryCapture {
    pub(crate) fn new(layer_limit: usize, threads: i32, sequences: usize) -> Self {
        Self {
            threads,
            in_place_tokens: sequences.clamp(1, 64),
            in_place: None,
            layer_limit,
            wanted: Vec::new(),
            devices: Vec::new(),
            layers: Vec::new(),
            masks: Vec::new(),
            nodes: Vec::new(),
            moved: Vec::new(),
        }
    }

    /// Keeps queries in place, or not, whatever the device is.
    pub(crate) fn set_in_place(&mut self, in_place: bool) {
        self.in_place = Some(in_place);
    }

    /// Forgets the last batch.
    pub(crate) fn begin_batch(&mut self) {
        self.layers.clear();
        self.wanted.clear();
        self.masks.clear();
        self.nodes.clear();
        self.moved.clear();
        for device in &mut self.devices {
            device.copies_used = 0;
            device.masks_used = 0;
        }
    }

    /// Takes note of a node that llama.cpp is about to compute.
    pub(super) fn note_node(&mut self, node: *mut sys::ggml_tensor) {
        // SAFETY: llama.cpp passes a live node, and nothing else uses it now.
        let view_source = unsafe { (*node).view_src };
        if !view_source.is_null() && self.moved.contains(&view_source) {
            Self::follow_base(node);
        }
        self.nodes.push(node);
    }

    /// Points a view at the data of the tensor that it is a view of.
    fn follow_base(view: *mut sys::ggml_tensor) {
        // SAFETY: the view is a live node of the graph, and so is its base. The view lies within the base.
        unsafe {
            let base = (*view).view_src;
            (*view).data = (*base).data.cast::<u8>().add((*view).view_offs).cast();
            (*view).buffer = (*base).buffer;
        }
    }

    fn device_index(&mut self, device: sys::ggml_backend_dev_t) -> Option<usize> {
        if let Some(n) = self.devices.iter().position(|known| known.device == device) {
            return Some(n);
        }
        self.devices.push(CaptureDevice::open(device, self.threads)?);
        Some(self.devices.len() - 1)
    }

    /// Keeps the queries of a layer in place, before its flash attention is computed. True if that is not possible: then they
    /// are copied afterwards, by [`copy_queries`](Self::copy_queries).
    pub(crate) fn keep_queries(&mut self, node: &GraphNode<'_>, layer: usize, wanted: &[usize]) -> bool {
        if self.wanted.is_empty() {
            self.wanted.extend_from_slice(wanted);
        }
        let Some(operands) = FlashOperands::of(node.0) else { return false };
        let Some(device) = device_of(operands.keys.buffer).and_then(|device| self.device_index(device))
        else {
            return false;
        };
        // A mask that is an input can be read before the graph runs; later it may be overwritten.
        if !operands.mask_is_input {
            return true;
        }
        let Some(mask) = self.keep_mask(&operands, device) else { return true };
        let tokens = operands.queries.ne[1];
        if usize::try_from(tokens).is_ok_and(|tokens| tokens <= self.in_place_tokens)
            && let Some((data, buffer)) = self.keep_in_place(&operands, device, layer)
        {
            let head_stride = operands.queries.nb[2];
            self.layers.push(KeptLayer {
                layer,
                device,
                keys: operands.keys,
                heads: operands.queries.ne[2],
                queries: data,
                query_buffer: buffer,
                row_stride: operands.queries.nb[1],
                head_stride,
                has_all_tokens: true,
                scoring: operands.scoring,
                sinks: operands.sinks,
                mask,
            });
            return false;
        }
        true
    }

    /// Points the queries at memory of ours. None if that is not safe: then nothing was changed.
    ///
    /// The tensor is one that the graph computes, on the same device and in the same run of nodes, and it holds the queries
    /// and nothing else. All views of it are moved too: those before the attention have been noted, and later ones are
    /// moved by [`note_node`](Self::note_node).
    fn keep_in_place(
        &mut self,
        operands: &FlashOperands,
        device: usize,
        layer: usize,
    ) -> Option<(*mut u8, sys::ggml_backend_buffer_t)> {
        // A layer has the same slot in every batch: the graph of an earlier batch may still point into it.
        if layer >= self.layer_limit || self.layers.iter().any(|kept| kept.layer == layer) {
            return None;
        }
        let tokens = usize::try_from(operands.queries.ne[1]).ok()?;
        let [size, _, heads, _] = operands.queries.ne;
        let elements = usize::try_from(size * heads).ok()?.checked_mul(tokens)?;
        let base = operands.query_base;
        // SAFETY: the base is null or a live tensor of the graph.
        let base_ref = unsafe { base.as_ref() }?;
        let base_elements: i64 = base_ref.ne.iter().product();
        let side = &mut self.devices[device];
        let simple = base_ref.type_ == sys::GGML_TYPE_F32
            && base_ref.op != sys::GGML_OP_NONE
            && base_ref.view_src.is_null()
            && base_ref.flags.cast_unsigned() & sys::GGML_TENSOR_FLAG_OUTPUT == 0
            && base_elements == i64::try_from(elements).ok()?
            // The data of the queries begins where the base begins.
            && operands.query_offset == 0;
        if !simple || !self.in_place.unwrap_or(!side.is_cpu) {
            return None;
        }
        let row = elements / tokens.max(1) * 4;
        if side.in_place.is_none() {
            side.in_place_row = row;
            side.in_place_slot = (row * self.in_place_tokens).next_multiple_of(SLOT_ALIGN);
            side.in_place = DeviceBuffer::new(side.buffer_type, side.in_place_slot * self.layer_limit);
        }
        let memory = side.in_place.as_ref()?;
        if row > side.in_place_row {
            return None;
        }
        // SAFETY: the slot is within the buffer, checked above.
        let data = unsafe { memory.data.add(layer * side.in_place_slot) };
        let buffer = memory.buffer.as_ptr();
        if base_ref.data.cast::<u8>() == data {
            // llama.cpp reuses the graph, with the pointers of an earlier batch.
            return Some((data, buffer));
        }
        // The base is computed after this call only if it is in the run of nodes that is about to start: between it and the
        // attention all nodes are on one device.
        let known = self.nodes.iter().rposition(|&node| node == base)?;
        let same_device = |node: &*mut sys::ggml_tensor| {
            // SAFETY: the noted nodes belong to the graph of the running batch.
            let buffer = unsafe { (**node).buffer };
            device_of(buffer) == Some(side.device)
        };
        if !self.nodes[known..].iter().all(same_device) {
            return None;
        }
        // SAFETY: the base is a live tensor of the graph, which is not running now. The slot has room for its data.
        unsafe {
            (*base).data = data.cast();
            (*base).buffer = buffer;
        }
        for &node in &self.nodes[known..] {
            // SAFETY: the noted nodes belong to the graph of the running batch.
            if unsafe { (*node).view_src } == base {
                Self::follow_base(node);
            }
        }
        self.moved.push(base);
        // The queries of the attention may be a view that is no node of its own.
        if operands.query_view != base {
            Self::follow_base(operands.query_view);
        }
        Some((data, buffer))
    }

    /// Copies the rows of the mask that are wanted, once per batch and mask.
    fn keep_mask(&mut self, operands: &FlashOperands, device: usize) -> Option<usize> {
        let mask = &operands.mask;
        let source: *mut c_void = mask.data.cast();
        if let Some(n) = self.masks.iter().position(|kept| kept.source == source && kept.device == device) {
            return Some(n);
        }
        let last = *self.wanted.last()?;
        if i64::try_from(last).ok()? >= mask.ne[1] || mask.ne[2] != 1 || mask.ne[3] != 1 {
            return None;
        }
        let row_bytes = mask.nb[1];
        let side = &mut self.devices[device];
        let bytes = (self.wanted.len() * row_bytes).next_multiple_of(SLOT_ALIGN);
        // Two masks: one for global layers, one for layers with a sliding window.
        let (data, buffer) =
            CaptureDevice::take(&mut side.masks, &mut side.masks_used, side.buffer_type, bytes, 2 * bytes)?;
        let cells = mask.ne[0];
        let mut row = 0;
        for tokens in self.wanted.chunk_by(|a, b| a + 1 == *b) {
            let len = cells * i64::try_from(tokens.len()).ok()?;
            // SAFETY: the rows are within the mask and follow each other, checked above and by `FlashOperands::of`; the copy
            // has a row for each of them.
            unsafe {
                let from = mask.data.add(tokens[0] * row_bytes);
                let to = data.add(row * row_bytes);
                copy_flat((from, mask.buffer), (to, buffer), mask.kind, mask.nb[0], len);
            }
            row += tokens.len();
        }
        let kind = mask.kind;
        self.masks.push(KeptMask { source, device, kind, cells, data, buffer, row_bytes });
        Some(self.masks.len() - 1)
    }

    /// Copies the queries of the wanted tokens, after the flash attention of a layer was computed.
    pub(crate) fn copy_queries(&mut self, node: &GraphNode<'_>, layer: usize) {
        let Some(operands) = FlashOperands::of(node.0) else { return };
        let kept = device_of(operands.keys.buffer)
            .and_then(|device| self.device_index(device))
            .and_then(|device| self.copied_layer(&operands, device, layer));
        self.layers.extend(kept);
    }

    fn copied_layer(&mut self, operands: &FlashOperands, device: usize, layer: usize) -> Option<KeptLayer> {
        let mask = self.keep_mask(operands, device)?;
        let queries = &operands.queries;
        let [size, tokens, heads, _] = queries.ne;
        let last = *self.wanted.last()?;
        if i64::try_from(last).ok()? >= tokens {
            return None;
        }
        let head_stride = usize::try_from(size).ok()? * 4;
        let row_stride = head_stride * usize::try_from(heads).ok()?;
        let side = &mut self.devices[device];
        let bytes = (self.wanted.len() * row_stride).next_multiple_of(SLOT_ALIGN);
        let expected = bytes * self.layer_limit;
        let (data, buffer) =
            CaptureDevice::take(&mut side.copies, &mut side.copies_used, side.buffer_type, bytes, expected)?;
        let heads_follow = queries.nb[2] == head_stride;
        let rows_follow = heads_follow && queries.nb[1] == row_stride;
        let mut row = 0;
        for tokens in self.wanted.chunk_by(|a, b| rows_follow && a + 1 == *b) {
            let pieces = if heads_follow { 1 } else { usize::try_from(heads).ok()? };
            let piece_bytes = tokens.len() * row_stride / pieces;
            for piece in 0..pieces {
                let len = i64::try_from(piece_bytes / 4).ok()?;
                // SAFETY: the tokens and the heads are within the queries, and the copy is within the memory taken for it.
                unsafe {
                    let from = queries.data.add(tokens[0] * queries.nb[1] + piece * queries.nb[2]);
                    let to = data.add(row * row_stride + piece * piece_bytes);
                    copy_flat((from, queries.buffer), (to, buffer), sys::GGML_TYPE_F32, 4, len);
                }
            }
            row += tokens.len();
        }
        Some(KeptLayer {
            layer,
            device,
            keys: operands.keys,
            heads,
            queries: data,
            query_buffer: buffer,
            row_stride,
            head_stride,
            has_all_tokens: false,
            scoring: operands.scoring,
            sinks: operands.sinks,
            mask,
        })
    }

    /// The layers of the last batch whose queries were kept.
    pub(crate) fn kept_layers(&self) -> impl Iterator<Item = usize> + '_ {
        self.layers.iter().map(|kept| kept.layer)
    }

    /// Whether a part of the attention of the last batch goes to attention sinks, so that its rows add up to less than 1.
    pub(crate) fn has_sinks(&self) -> bool {
        self.layers.iter().any(|kept| kept.sinks.is_some())
    }

    /// The most tokens of a batch whose queries are kept in place.
    pub(crate) fn in_place_tokens(&self) -> usize {
        self.in_place_tokens
    }

    /// How many layers of the last batch were kept in place.
    pub(crate) fn in_place_count(&self) -> usize {
        let in_place = |kept: &&KeptLayer| {
            let memory = self.devices[kept.device].in_place.as_ref();
            memory.is_some_and(|memory| memory.buffer.as_ptr() == kept.query_buffer)
        };
        self.layers.iter().filter(in_place).count()
    }

    /// Computes rows of the last batch, which llama.cpp must have finished.
    pub(crate) fn compute_rows(&mut self, jobs: &[RowJob]) -> Result<Vec<RowResult>, LlamaError> {
        let mut results = vec![RowResult::default(); jobs.len()];
        for device in 0..self.devices.len() {
            let jobs: Vec<GraphJob> = jobs.iter().map(|job| self.graph_job(job, device)).collect();
            if jobs.iter().all(|job| job.layers.is_empty()) {
                continue;
            }
            let side = &mut self.devices[device];
            if side.graph.as_ref().is_none_or(|graph| graph.jobs != jobs) {
                let memory = side.graph.take().map(|graph| graph.into_allocator());
                side.graph = Some(SmallGraph::build(side.backend, side.buffer_type, jobs, memory)?);
            }
            if let Some(graph) = &side.graph {
                graph.compute(side.backend, &mut results)?;
            }
        }
        Ok(results)
    }

    /// The part of a job that is computed on one device.
    fn graph_job(&self, job: &RowJob, device: usize) -> GraphJob {
        let wanted = |kept: &&KeptLayer| job.layers.contains(&kept.layer);
        let layer_count = self.layers.iter().filter(wanted).count();
        let layers = self.layers.iter().filter(wanted).filter(|kept| kept.device == device);
        let layers = layers.filter_map(|kept| {
            let mask = self.masks.get(kept.mask)?;
            let mask_row = self.wanted.binary_search(&job.token).ok()?;
            let row = if kept.has_all_tokens { job.token } else { mask_row };
            // SAFETY: the token is among those that were kept, so its rows are within the memory taken for them.
            let (queries, mask_data) = unsafe {
                (kept.queries.add(row * kept.row_stride), mask.data.add(mask_row * mask.row_bytes))
            };
            Some(GraphLayer {
                layer: kept.layer,
                keys: kept.keys,
                heads: kept.heads,
                queries,
                query_buffer: kept.query_buffer,
                head_stride: kept.head_stride,
                scoring: kept.scoring,
                sinks: kept.sinks,
                mask: TensorView {
                    kind: mask.kind,
                    ne: [mask.cells, 1, 1, 1],
                    nb: [
                        mask.row_bytes / usize::try_from(mask.cells).unwrap_or(1).max(1),
                        mask.row_bytes,
                        mask.row_bytes,
                        mask.row_bytes,
                    ],
                    data: mask_data,
                    buffer: mask.buffer,
                },
            })
        });
        GraphJob { heads: job.heads, layer_count, layers: layers.collect() }
    }
}

/// The operands of a flash attention node.
struct FlashOperands {
    queries: TensorView,
    query_view: *mut sys::ggml_tensor,
    /// The tensor that the queries are a view of, or the queries themselves.
    query_base: *mut sys::ggml_tensor,
    query_offset: usize,
    keys: TensorView,
    mask: TensorView,
    mask_is_input: bool,
    sinks: Option<TensorView>,
    scoring: Scoring,
}

impl FlashOperands {
    /// None where the attention has another form than the small graph computes.
    fn of(node: &sys::ggml_tensor) -> Option<Self> {
        let [query_view, keys, _, mask, sinks, ..] = node.src;
        // SAFETY: the operands of a live node are live tensors of the same graph, or null.
        let (queries, keys, mask, sinks) =
            unsafe { (query_view.as_ref()?, keys.as_ref()?, mask.as_ref()?, sinks.as_ref()) };
        let query_base = if queries.view_src.is_null() { query_view } else { queries.view_src };
        let [scale, max_bias, soft_cap] =
            [0, 1, 2].map(|n| f32::from_bits(node.op_params[n].cast_unsigned()));
        let one_stream = queries.ne[3] == 1 && keys.ne[3] == 1;
        let [head_size, _, heads, _] = queries.ne;
        let grouped = keys.ne[2] > 0 && heads % keys.ne[2] == 0 && head_size == keys.ne[0];
        let plain = queries.type_ == sys::GGML_TYPE_F32 && queries.nb[0] == 4;
        let rows_follow = usize::try_from(mask.ne[0]).is_ok_and(|cells| mask.nb[1] == cells * mask.nb[0]);
        let fits = mask.ne[0] == keys.ne[1] && queries.ne[1] > 0 && mask.ne[0] > 0;
        let has_data = !queries.data.is_null() && !keys.data.is_null() && !mask.data.is_null();
        if !(one_stream && grouped && plain && rows_follow && fits && has_data) {
            return None;
        }
        Some(Self {
            queries: TensorView::of(queries),
            query_view,
            query_base,
            query_offset: if queries.view_src.is_null() { 0 } else { queries.view_offs },
            keys: TensorView::of(keys),
            mask: TensorView::of(mask),
            mask_is_input: mask.op == sys::GGML_OP_NONE,
            sinks: sinks.map(TensorView::of),
            scoring: Scoring { scale, max_bias, soft_cap },
        })
    }
}
