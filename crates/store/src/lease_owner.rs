//! Which process owns a lease, so that another one on the same machine can tell that it has ended.
//!
//! Only a proof counts: a process that cannot be seen from here, on another machine or in another container, may be alive, and
//! its lease is awaited. A wrong proof would do no harm to data, because who takes over raises the epoch.

use std::fmt;

/// A process on a machine that was started once.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MachineProcess {
    /// The start of the machine, and the namespace that process numbers are of.
    machine: String,
    process: u32,
    /// When the process began: its number is used again.
    started: String,
}

impl MachineProcess {
    fn this() -> Option<Self> {
        let process = std::process::id();
        Some(Self { machine: machine()?, process, started: start_time(process)? })
    }

    fn has_ended(&self) -> bool {
        machine().as_ref() == Some(&self.machine)
            && start_time(self.process).as_ref() != Some(&self.started)
            // Some systems hide the processes of other users. Process 1 runs everywhere.
            && start_time(1).is_some()
    }
}

/// What a lease stores of its owner: unique for each pool of connections of each process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeaseOwner {
    unique: u64,
    /// None where the system does not tell.
    place: Option<MachineProcess>,
}

impl LeaseOwner {
    pub(crate) fn new_here() -> Self {
        use std::hash::{BuildHasher, RandomState};
        Self { unique: RandomState::new().hash_one(std::process::id()), place: MachineProcess::this() }
    }

    fn parse(text: &str) -> Option<Self> {
        let (unique, place) = text.split_once(' ')?;
        let unique = u64::from_str_radix(unique, 16).ok()?;
        let mut fields = place.split(' ');
        let place = match (fields.next(), fields.next(), fields.next()) {
            (Some(machine), Some(process), Some(started)) => Some(MachineProcess {
                machine: machine.to_owned(),
                process: process.parse().ok()?,
                started: started.to_owned(),
            }),
            _ => None,
        };
        Some(Self { unique, place })
    }

    /// The number of the process that is stored as `text`, if it runs on this machine.
    pub(crate) fn local_process(text: &str) -> Option<u32> {
        let place = Self::parse(text)?.place?;
        (machine()? == place.machine).then_some(place.process)
    }

    /// Whether it is proved that the process that is stored as `text` has ended.
    pub(crate) fn has_ended(text: &str) -> bool {
        Self::parse(text).and_then(|owner| owner.place).is_some_and(|place| place.has_ended())
    }

    /// Whether `text` is this process, perhaps another pool of it.
    pub(crate) fn is_this_process(text: &str) -> bool {
        let place = Self::parse(text).and_then(|owner| owner.place);
        place.is_some() && place == MachineProcess::this()
    }
}

impl fmt::Display for LeaseOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x} ", self.unique)?;
        match &self.place {
            Some(place) => write!(f, "{} {} {}", place.machine, place.process, place.started),
            None => f.write_str("-"),
        }
    }
}

/// What process numbers of this process are unique in.
#[cfg(target_os = "linux")]
fn machine() -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = std::fs::metadata("/proc/self/ns/pid").ok()?.ino();
    Some(format!("{}/{namespace}", boot.trim()))
}

#[cfg(not(target_os = "linux"))]
fn machine() -> Option<String> {
    None
}

/// When a process began, in clock ticks since the machine did; none if there is no such process.
fn start_time(process: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The second field is the name of the program in parentheses, and may contain both.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ');
    // A process that has ended and was not waited for yet is listed as a zombie.
    let is_running = fields.next().is_some_and(|state| state != "Z" && state != "X");
    fields.nth(18).filter(|_| is_running).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn lease_owner_has_ended_only_if_that_is_proved() {
        let this = LeaseOwner::new_here().to_string();
        assert!(LeaseOwner::is_this_process(&this) && !LeaseOwner::has_ended(&this));
        assert_eq!(LeaseOwner::local_process(&this), Some(std::process::id()));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep starts");
        let process = child.id();
        let place = MachineProcess {
            machine: machine().expect("it is Linux"),
            process,
            started: start_time(process).expect("it runs"),
        };
        let owner = |place: &MachineProcess| LeaseOwner { unique: 7, place: Some(place.clone()) }.to_string();
        assert!(!LeaseOwner::has_ended(&owner(&place)), "it runs");
        let earlier = MachineProcess { started: "1".into(), ..place.clone() };
        assert!(LeaseOwner::has_ended(&owner(&earlier)), "its number was used again");
        let elsewhere = MachineProcess { machine: "another/1".into(), ..earlier };
        assert!(!LeaseOwner::has_ended(&owner(&elsewhere)), "it cannot be seen from here");
        assert_eq!(LeaseOwner::local_process(&owner(&elsewhere)), None);
        child.kill().expect("it is killed");
        // A zombie has ended, too.
        let started = std::time::Instant::now();
        while !LeaseOwner::has_ended(&owner(&place)) {
            assert!(started.elapsed().as_secs() < 20, "the end of a process is seen");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        child.wait().expect("it ends");
        for unknown in ["", "x", "0000000000000007 -", "zz a 1 2"] {
            assert!(!LeaseOwner::has_ended(unknown) && !LeaseOwner::is_this_process(unknown), "{unknown:?}");
        }
    }
}
