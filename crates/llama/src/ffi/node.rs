//! A read-only view of one ggml tensor, valid inside the evaluation callback.

use llama_cpp_sys_2 as sys;

/// A node of the compute graph that llama.cpp is evaluating.
pub(crate) struct GraphNode<'a>(pub(super) &'a sys::ggml_tensor);

impl GraphNode<'_> {
    pub(crate) fn name(&self) -> &[u8] {
        let name = &self.0.name;
        let end = name.iter().position(|&c| c == 0).unwrap_or(name.len());
        // SAFETY: `c_char` and `u8` have the same size and alignment, and `end` is within the array.
        unsafe { std::slice::from_raw_parts(name.as_ptr().cast(), end) }
    }

    /// The tensor that this one is a view of.
    pub(crate) fn view_source(&self) -> Option<GraphNode<'_>> {
        // SAFETY: the pointer is null or points to a tensor of the same graph, which outlives this node.
        unsafe { self.0.view_src.as_ref() }.map(GraphNode)
    }

    /// The `n`-th operand of the operation that computes this tensor.
    pub(crate) fn source(&self, n: usize) -> Option<GraphNode<'_>> {
        // SAFETY: the pointer is null or points to a tensor of the same graph, which outlives this node.
        self.0.src.get(n).and_then(|&src| unsafe { src.as_ref() }).map(GraphNode)
    }

    pub(crate) fn is_set_rows(&self) -> bool {
        self.0.op == sys::GGML_OP_SET_ROWS
    }

    pub(crate) fn is_soft_max(&self) -> bool {
        self.0.op == sys::GGML_OP_SOFT_MAX
    }

    pub(crate) fn is_flash_attention(&self) -> bool {
        self.0.op == sys::GGML_OP_FLASH_ATTN_EXT
    }

    /// Whether the tensor is an input of the graph: its data is there before anything is computed.
    pub(crate) fn is_input(&self) -> bool {
        self.0.op == sys::GGML_OP_NONE
    }

    /// Whether the node rotates keys or queries by their positions.
    pub(crate) fn is_rope(&self) -> bool {
        self.0.op == sys::GGML_OP_ROPE
    }

    pub(crate) fn dims(&self) -> [usize; 4] {
        self.0.ne.map(|n| usize::try_from(n).unwrap_or(0))
    }

    /// The row of a token and a head, if the tensor holds 32-bit floats. A row in host memory is borrowed in place; a
    /// row on a device is copied to `scratch`.
    pub(crate) fn f32_row<'r>(
        &'r self,
        token: usize,
        head: usize,
        scratch: &'r mut Vec<f32>,
    ) -> Option<&'r [f32]> {
        let [cells, tokens, heads, _] = self.dims();
        let contiguous_f32 = self.0.type_ == sys::GGML_TYPE_F32 && self.0.nb[0] == 4;
        if !contiguous_f32 || token >= tokens || head >= heads {
            return None;
        }
        let start = token * self.0.nb[1] + head * self.0.nb[2];
        // SAFETY: `ggml_nbytes` only reads the fields of a live tensor.
        if start + cells * 4 > unsafe { sys::ggml_nbytes(self.0) } {
            return None;
        }
        let buffer = self.0.buffer;
        // SAFETY: the buffer is not null and belongs to a live tensor.
        let on_host = !buffer.is_null() && unsafe { sys::ggml_backend_buffer_is_host(buffer) };
        if on_host && !self.0.data.is_null() && (self.0.data as usize + start).is_multiple_of(4) {
            // SAFETY: the range lies within the tensor and is aligned, both checked above; nothing writes to the tensor
            // until the callback returns; every bit pattern is a valid float.
            return Some(unsafe {
                std::slice::from_raw_parts(self.0.data.cast::<u8>().add(start).cast(), cells)
            });
        }
        scratch.resize(cells, 0.0);
        // SAFETY: the range lies within the tensor, and `scratch` holds `cells` floats of four bytes.
        unsafe { sys::ggml_backend_tensor_get(self.0, scratch.as_mut_ptr().cast(), start, cells * 4) };
        Some(scratch)
    }

    /// The cells that a token can attend to, if this is a mask of 16-bit or 32-bit floats. The mask adds a finite number to the
    /// score of such a cell (0, or the bias of ALiBi), and minus infinity to all others.
    pub(crate) fn visible_cells(&self, token: usize, scratch: &mut Vec<f32>) -> Vec<u32> {
        let finite = |row: &[f32]| {
            let visible = row.iter().enumerate().filter(|(_, bias)| **bias > f32::NEG_INFINITY);
            visible.map(|(cell, _)| cell as u32).collect()
        };
        if self.0.type_ != sys::GGML_TYPE_F16 {
            return self.f32_row(token, 0, scratch).map(finite).unwrap_or_default();
        }
        let [cells, tokens, ..] = self.dims();
        let start = token.saturating_mul(self.0.nb[1]);
        // SAFETY: `ggml_nbytes` only reads the fields of a live tensor.
        let bytes = unsafe { sys::ggml_nbytes(self.0) };
        if token >= tokens || self.0.nb[0] != 2 || start + cells * 2 > bytes || self.0.data.is_null() {
            return Vec::new();
        }
        let mut halves = vec![0u16; cells];
        // SAFETY: the range lies within the tensor, and the buffer holds as many numbers of two bytes.
        unsafe { sys::ggml_backend_tensor_get(self.0, halves.as_mut_ptr().cast(), start, cells * 2) };
        /// Minus infinity as a 16-bit float.
        const MINUS_INFINITY: u16 = 0xfc00;
        let visible = halves.iter().enumerate().filter(|(_, half)| **half != MINUS_INFINITY);
        visible.map(|(cell, _)| cell as u32).collect()
    }

    /// Copies the tensor, if it holds 64-bit integers; returns whether it does.
    pub(crate) fn read_i64(&self, into: &mut Vec<i64>) -> bool {
        let len: usize = self.dims().iter().product();
        // SAFETY: `ggml_nbytes` only reads the fields of a live tensor.
        if self.0.type_ != sys::GGML_TYPE_I64 || unsafe { sys::ggml_nbytes(self.0) } != len * 8 {
            return false;
        }
        into.resize(len, 0);
        // SAFETY: the tensor has exactly `len * 8` bytes, checked above, and the buffer holds as many.
        unsafe { sys::ggml_backend_tensor_get(self.0, into.as_mut_ptr().cast(), 0, len * 8) };
        true
    }
}
