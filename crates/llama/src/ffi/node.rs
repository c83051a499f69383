//! A node of the graph, looked at while it is computed.

use llama_cpp_sys_2 as sys;

/// A node of the graph.
pub(crate) struct Node<'a>(pub(super) &'a sys::ggml_tensor);

impl Node<'_> {
    /// Its name.
    pub(crate) fn name(&self) -> &[u8] {
        let name = &self.0.name;
        let end = name.iter().position(|&c| c == 0).unwrap_or(name.len());
        // SAFETY: both are arrays of bytes.
        unsafe { std::slice::from_raw_parts(name.as_ptr().cast(), end) }
    }

    /// The name of what it is a view of.
    pub(crate) fn view_of(&self) -> Option<Node<'_>> {
        // SAFETY: nodes of a graph live as long as it does.
        unsafe { self.0.view_src.as_ref() }.map(Node)
    }

    /// One of the nodes that it is made from.
    pub(crate) fn source(&self, n: usize) -> Option<Node<'_>> {
        // SAFETY: as above.
        self.0.src.get(n).and_then(|&src| unsafe { src.as_ref() }).map(Node)
    }

    /// Whether it sets rows of a table.
    pub(crate) fn sets_rows(&self) -> bool {
        self.0.op == sys::GGML_OP_SET_ROWS
    }

    /// Its extent.
    pub(crate) fn extent(&self) -> [usize; 4] {
        self.0.ne.map(|n| usize::try_from(n).unwrap_or(0))
    }

    /// One row of 32-bit floats: that of a token and a head. Where it lies in this machine's own memory it is looked at
    /// in place, else it is copied to `into`.
    pub(crate) fn row<'r>(&'r self, token: usize, head: usize, into: &'r mut Vec<f32>) -> Option<&'r [f32]> {
        let [cells, tokens, heads, _] = self.extent();
        let plain = self.0.type_ == sys::GGML_TYPE_F32 && self.0.nb[0] == 4;
        if !plain || token >= tokens || head >= heads {
            return None;
        }
        let start = token * self.0.nb[1] + head * self.0.nb[2];
        // SAFETY: the question is asked of a node that was just computed.
        if start + cells * 4 > unsafe { sys::ggml_nbytes(self.0) } {
            return None;
        }
        let buffer = self.0.buffer;
        // SAFETY: a buffer that there is can be asked where it lies.
        let here = !buffer.is_null() && unsafe { sys::ggml_backend_buffer_is_host(buffer) };
        if here && !self.0.data.is_null() && (self.0.data as usize + start).is_multiple_of(4) {
            // SAFETY: the range lies within the node, in memory that nobody writes to until the callback has returned;
            // floats may have any bits, and are aligned as was just asked.
            return Some(unsafe {
                std::slice::from_raw_parts(self.0.data.cast::<u8>().add(start).cast(), cells)
            });
        }
        into.resize(cells, 0.0);
        // SAFETY: the range lies within the node, and the buffer holds as much; any bits are floats.
        unsafe { sys::ggml_backend_tensor_get(self.0, into.as_mut_ptr().cast(), start, cells * 4) };
        Some(into)
    }

    /// Its numbers, if they are 64-bit integers.
    pub(crate) fn integers(&self, into: &mut Vec<i64>) -> bool {
        let len: usize = self.extent().iter().product();
        // SAFETY: as above.
        if self.0.type_ != sys::GGML_TYPE_I64 || unsafe { sys::ggml_nbytes(self.0) } != len * 8 {
            return false;
        }
        into.resize(len, 0);
        // SAFETY: as above.
        unsafe { sys::ggml_backend_tensor_get(self.0, into.as_mut_ptr().cast(), 0, len * 8) };
        true
    }
}
