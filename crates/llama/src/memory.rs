//! How much memory there is to have, so that too large a wish is refused and not granted until the system kills us.

use crate::ffi::LlamaError;
use std::fs;

/// Bytes that can be had without harm; none where the system does not tell.
#[must_use]
pub fn available() -> Option<u64> {
    let system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available_of(&text));
    // A container may be allowed less than the machine has.
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let most = number("/sys/fs/cgroup/memory.max");
    let used = number("/sys/fs/cgroup/memory.current").unwrap_or(0);
    let cached = fs::read_to_string("/sys/fs/cgroup/memory.stat").ok().and_then(|text| cached_of(&text));
    let container = most.map(|most| most.saturating_sub(used.saturating_sub(cached.unwrap_or(0))));
    match (system, container) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}

/// Whether so many bytes can be had.
///
/// # Errors
/// When they cannot; where the system does not tell, nobody knows, and it is tried.
pub fn enough(need: u64, free: Option<u64>) -> Result<(), LlamaError> {
    match free {
        Some(free) if free < need => Err(LlamaError::Memory { need: need >> 20, free: free >> 20 }),
        _ => Ok(()),
    }
}

fn available_of(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// What a container holds of files, which it gives back when asked.
fn cached_of(stat: &str) -> Option<u64> {
    stat.lines().find_map(|l| l.strip_prefix("inactive_file "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_is_refused() {
        assert!(enough(1 << 30, None).is_ok() && enough(1 << 30, Some(1 << 30)).is_ok());
        let refused = enough(3 << 30, Some(1 << 30)).expect_err("it cannot be had").to_string();
        assert!(refused.starts_with("3072 MiB of memory are needed, and 1024 MiB are free"), "{refused}");
    }

    #[test]
    fn numbers_are_read() {
        let meminfo = "MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable:     2048 kB\n";
        assert_eq!(available_of(meminfo), Some(2 << 20));
        assert_eq!((available_of("MemFree: 1 kB"), available_of("MemAvailable: much")), (None, None));
        assert_eq!(cached_of("anon 5\ninactive_file 4096\nactive_file 1\n"), Some(4096));
    }
}
