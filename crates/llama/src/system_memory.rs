//! Free memory of the machine or container. A context that does not fit is refused before it is created: Linux grants
//! the allocation and kills the process later.

use crate::ffi::error::LlamaError;
use std::fs;

/// Bytes that can be allocated without swapping. None where the system has neither `/proc/meminfo` nor cgroups.
#[must_use]
pub fn available_bytes() -> Option<u64> {
    let system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| parse_meminfo(&text));
    // The cgroup of a container may have a lower limit than the machine.
    let read_u64 = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = read_u64("/sys/fs/cgroup/memory.max");
    let used = read_u64("/sys/fs/cgroup/memory.current").unwrap_or(0);
    let cached =
        fs::read_to_string("/sys/fs/cgroup/memory.stat").ok().and_then(|text| parse_inactive_file(&text));
    let container = limit.map(|limit| limit.saturating_sub(used.saturating_sub(cached.unwrap_or(0))));
    match (system, container) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

pub fn check_available(need: u64, free: Option<u64>) -> Result<(), LlamaError> {
    match free {
        Some(free) if free < need => Err(LlamaError::OutOfMemory { need: need >> 20, free: free >> 20 }),
        _ => Ok(()),
    }
}

fn parse_meminfo(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Bytes of the page cache that count as used memory of the cgroup, and that the kernel reclaims when needed.
fn parse_inactive_file(stat: &str) -> Option<u64> {
    stat.lines().find_map(|l| l.strip_prefix("inactive_file "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_check_refuses_more_than_available() {
        assert!(check_available(1 << 30, None).is_ok() && check_available(1 << 30, Some(1 << 30)).is_ok());
        let error = check_available(3 << 30, Some(1 << 30)).expect_err("too little is free").to_string();
        assert!(error.starts_with("3072 MiB of memory are needed and 1024 MiB are free"), "{error}");
    }

    #[test]
    fn memory_parses_meminfo_and_cgroup_stat() {
        let meminfo = "MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable:     2048 kB\n";
        assert_eq!(parse_meminfo(meminfo), Some(2 << 20));
        assert_eq!((parse_meminfo("MemFree: 1 kB"), parse_meminfo("MemAvailable: x")), (None, None));
        assert_eq!(parse_inactive_file("anon 5\ninactive_file 4096\nactive_file 1\n"), Some(4096));
    }
}
