//! A short run of the crash bench: power cuts and full disks.

use halo_bench::crash::{CrashBenchReport, cut_power, fill_disk};

#[test]
fn crash_power_cuts_and_full_disks_lose_nothing() {
    let mut report = CrashBenchReport::default();
    cut_power(60, 5, &mut |_| {}, &mut report);
    fill_disk(16, 5, &mut |_| {}, &mut report);
    assert!(report.is_clean(), "{report:?}");
    assert!(report.power_cuts == 180 && report.full_disks > 100, "{report:?}");
}
