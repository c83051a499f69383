//! `halo licenses`: the licences of the third-party code in this program.

use crate::output::print_stdout;
use anyhow::Result;

/// Written by `scripts/licenses` from the sources of the packages.
const THIRD_PARTY_LICENSES: &str = include_str!("../../../../THIRD_PARTY_LICENSES.md");

pub fn run() -> Result<()> {
    print_stdout(THIRD_PARTY_LICENSES)
}
