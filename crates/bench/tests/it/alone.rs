//! Tests that measure times, and tests that kill a program after a time, run one after the other.

use parking_lot::{Mutex, MutexGuard};

static RUNNING: Mutex<()> = Mutex::new(());

/// Waits until no other such test runs. The next one runs when the guard is dropped.
pub fn run_alone() -> MutexGuard<'static, ()> {
    RUNNING.lock()
}
