//! A short run of the crash bench: power cuts and full disks.

use halo_bench::crash::{CrashBenchReport, cut_power, fill_disk, fill_disk_that_can_be_freed};
use std::sync::Mutex;

/// The faulty disk is one for the process.
static FAULTY_DISK: Mutex<()> = Mutex::new(());

#[test]
fn crash_power_cuts_and_full_disks_lose_nothing() {
    let _turn = FAULTY_DISK.lock().expect("the lock is not poisoned");
    let mut report = CrashBenchReport::default();
    cut_power(60, 5, &mut |_| {}, &mut report);
    fill_disk(16, 5, &mut |_| {}, &mut report);
    assert!(report.is_clean(), "{report:?}");
    assert!(report.power_cuts == 180 && report.full_disks > 100, "{report:?}");
}

/// The disk is full again and again: each time the KV archive makes space, and no commit fails.
#[test]
fn commit_succeeds_when_the_kv_archive_makes_space() {
    let _turn = FAULTY_DISK.lock().expect("the lock is not poisoned");
    let (freed, stored) = fill_disk_that_can_be_freed(40, 7);
    assert!(freed > 5 && stored, "space was freed {freed} times; everything is stored: {stored}");
}
