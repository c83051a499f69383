//! The crash bench in small, on every test run: disks that lose power, and disks that are full.

use halo_bench::crash::{Report, cut_power, fill_disk};

#[test]
fn disks_that_fail_lose_nothing() {
    let mut report = Report::default();
    cut_power(60, 5, &mut |_| {}, &mut report);
    fill_disk(16, 5, &mut |_| {}, &mut report);
    assert!(report.clean(), "{report:?}");
    assert!(report.power_cuts == 180 && report.full_disks > 100, "{report:?}");
}
