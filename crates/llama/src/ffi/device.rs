//! The GPUs that llama.cpp can use, and memory on them.

use llama_cpp_sys_2 as sys;
use std::ptr::NonNull;

/// Free memory that layers can be spread over evenly: that of the fullest GPU, times the number of GPUs. None without a GPU, or
/// before the first model was loaded.
#[must_use]
pub fn free_gpu_bytes() -> Option<u64> {
    let mut free_bytes = Vec::new();
    // SAFETY: the functions take indices below the count and handles that they return, which live as long as the process.
    unsafe {
        for index in 0..sys::ggml_backend_dev_count() {
            let device = sys::ggml_backend_dev_get(index);
            if sys::ggml_backend_dev_type(device) == sys::GGML_BACKEND_DEVICE_TYPE_GPU {
                let (mut free, mut total) = (0usize, 0usize);
                sys::ggml_backend_dev_memory(device, &raw mut free, &raw mut total);
                free_bytes.push(free as u64);
            }
        }
    }
    let fullest = free_bytes.iter().copied().min()?;
    Some(fullest.saturating_mul(free_bytes.len() as u64))
}

/// Memory of the host that a GPU copies from and to without a detour (pinned memory). KV cells pass through it: llama.cpp copies
/// them layer by layer, and waits for each copy.
#[derive(Default)]
pub(super) struct StagingMemory {
    buffer: Option<DeviceBuffer>,
    /// There is no GPU, or it has no such memory.
    unavailable: bool,
}

impl StagingMemory {
    /// So many bytes; none where there is no pinned memory.
    pub(super) fn reserve(&mut self, bytes: usize) -> Option<&mut [u8]> {
        if self.buffer.as_ref().is_none_or(|buffer| buffer.bytes < bytes) && !self.unavailable {
            self.buffer = None;
            self.buffer = host_buffer_type()
                .and_then(|kind| DeviceBuffer::new(kind, bytes.next_multiple_of(STAGING_GRANULARITY)));
            self.unavailable = self.buffer.is_none();
        }
        let buffer = self.buffer.as_mut().filter(|buffer| buffer.bytes >= bytes && !buffer.data.is_null())?;
        // SAFETY: the buffer is memory of the host of at least this length, and is borrowed as long as the slice lives. It comes
        // from a foreign allocator, so that its bytes have some value, and any value is a byte.
        Some(unsafe { std::slice::from_raw_parts_mut(buffer.data, bytes) })
    }
}

const STAGING_GRANULARITY: usize = 1 << 20;

/// The type of pinned memory of the first GPU.
fn host_buffer_type() -> Option<sys::ggml_backend_buffer_type_t> {
    // SAFETY: the functions take a type of device and handles that they return, which live as long as the process; null is
    // checked.
    let kind = unsafe {
        let device = sys::ggml_backend_dev_by_type(sys::GGML_BACKEND_DEVICE_TYPE_GPU);
        if device.is_null() {
            return None;
        }
        sys::ggml_backend_dev_host_buffer_type(device)
    };
    (!kind.is_null()).then_some(kind)
}

/// Memory on a device, or pinned memory of the host.
pub(super) struct DeviceBuffer {
    pub(super) buffer: NonNull<sys::ggml_backend_buffer>,
    pub(super) data: *mut u8,
    pub(super) bytes: usize,
}

impl DeviceBuffer {
    pub(super) fn new(kind: sys::ggml_backend_buffer_type_t, bytes: usize) -> Option<Self> {
        // SAFETY: the buffer type belongs to a live buffer of the model or the context, and types are never freed.
        let buffer = NonNull::new(unsafe { sys::ggml_backend_buft_alloc_buffer(kind, bytes) })?;
        // SAFETY: the buffer was just allocated.
        let data = unsafe { sys::ggml_backend_buffer_get_base(buffer.as_ptr()) }.cast();
        Some(Self { buffer, data, bytes })
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: the buffer is freed once. The context whose graph may point into it is dropped before the capture.
        unsafe { sys::ggml_backend_buffer_free(self.buffer.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    /// A build without GPU support has none.
    #[cfg(not(any(feature = "cuda", feature = "vulkan", feature = "metal")))]
    #[test]
    fn device_without_gpu_has_no_gpu_memory() {
        assert_eq!(super::free_gpu_bytes(), None);
    }
}
