//! llama.cpp's log, forwarded to `tracing`. Its C API returns no error messages, so the first one that a call logs on this
//! thread is remembered and becomes the reason if it fails: later ones only say that it failed.

use llama_cpp_sys_2 as sys;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    static FIRST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
    static ERRORS_SUPPRESSED: Cell<bool> = const { Cell::new(false) };
    static WARNINGS_SUPPRESSED: Cell<bool> = const { Cell::new(false) };
}

/// Loads the library of ggml that is the fastest on this processor, from the folder of the package: `lib/halo` beside the `bin` of the
/// program.
#[cfg(feature = "dynamic-backends")]
fn load_backends() {
    use std::os::unix::ffi::OsStrExt;
    let program = std::env::current_exe().and_then(std::fs::canonicalize);
    let folder = program.ok().and_then(|program| Some(program.parent()?.parent()?.join("lib/halo")));
    let Some(path) = folder.and_then(|folder| std::ffi::CString::new(folder.as_os_str().as_bytes()).ok())
    else {
        return;
    };
    // SAFETY: the path is a string that ends with a zero byte; llama.cpp copies it.
    unsafe { sys::ggml_backend_load_all_from_path(path.as_ptr()) };
}

/// Sets the log callback and starts llama.cpp's backends, once per process.
pub(super) fn init() {
    static INIT: Once = Once::new();
    INIT.call_once(|| {
        // SAFETY: the callback is a static function without state.
        unsafe {
            sys::llama_log_set(Some(log_callback), std::ptr::null_mut());
        }
        #[cfg(feature = "dynamic-backends")]
        load_backends();
        // SAFETY: called once, before any other call of llama.cpp but those that set its log and load its backends.
        unsafe {
            sys::llama_backend_init();
        }
    });
}

unsafe extern "C" fn log_callback(level: sys::ggml_log_level, text: *const c_char, _data: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: llama.cpp passes a string that ends with a zero byte and lives as long as this call.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    // A panic of the subscriber must not unwind into llama.cpp.
    let _ = catch_unwind(AssertUnwindSafe(|| log_line(level, text.trim_end())));
}

fn log_line(level: sys::ggml_log_level, text: &str) {
    if level == sys::GGML_LOG_LEVEL_ERROR {
        if !ERRORS_SUPPRESSED.get() {
            FIRST_ERROR.with_borrow_mut(|first| {
                if first.is_empty() {
                    text.clone_into(first);
                }
            });
            tracing::error!(target: "llama", "{text}");
        }
    } else if level == sys::GGML_LOG_LEVEL_WARN && !WARNINGS_SUPPRESSED.get() {
        tracing::warn!(target: "llama", "{text}");
    } else {
        tracing::debug!(target: "llama", "{text}");
    }
}

/// Drops llama.cpp's error messages on this thread while it lives, for calls that are expected to fail.
pub(super) struct ErrorLogSuppressor;

impl ErrorLogSuppressor {
    pub(super) fn begin() -> Self {
        ERRORS_SUPPRESSED.set(true);
        Self
    }
}

impl Drop for ErrorLogSuppressor {
    fn drop(&mut self) {
        ERRORS_SUPPRESSED.set(false);
    }
}

/// Makes llama.cpp's warnings on this thread debug messages while it lives, for calls that it warns of for no reason.
pub(super) struct WarningLogSuppressor;

impl WarningLogSuppressor {
    pub(super) fn begin() -> Self {
        WARNINGS_SUPPRESSED.set(true);
        Self
    }
}

impl Drop for WarningLogSuppressor {
    fn drop(&mut self) {
        WARNINGS_SUPPRESSED.set(false);
    }
}

/// Forgets earlier messages, so that [`first_error`] returns only what the next call logs.
pub(super) fn clear_error() {
    FIRST_ERROR.take();
}

/// The first message since [`clear_error`].
pub(super) fn first_error() -> String {
    let message = FIRST_ERROR.take();
    if message.is_empty() { "llama.cpp gives no reason".into() } else { message }
}
