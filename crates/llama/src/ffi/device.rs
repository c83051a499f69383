//! The GPUs that llama.cpp can use.

use llama_cpp_sys_2 as sys;

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

#[cfg(test)]
mod tests {
    /// A build without GPU support has none.
    #[cfg(not(any(feature = "cuda", feature = "vulkan", feature = "metal")))]
    #[test]
    fn device_without_gpu_has_no_gpu_memory() {
        assert_eq!(super::free_gpu_bytes(), None);
    }
}
