//! Where captures are. A record names the folder of a capture relative to the data folder: a data folder that was copied or
//! moved has its own captures, and never deletes those of another one.

use super::CAPTURE_FILES;
use std::path::{Component, Path, PathBuf};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CaptureLocation {
    /// In this folder, within the data folder.
    Own(PathBuf),
    /// In this folder, outside of the data folder.
    Outside(PathBuf),
}

impl CaptureLocation {
    pub fn folder(&self) -> &Path {
        match self {
            Self::Own(folder) | Self::Outside(folder) => folder,
        }
    }
}

/// What a record says of a capture in a folder.
pub fn capture_note(folder: &Path, data_dir: Option<&Path>) -> String {
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let resolved = |path: &Path| path.canonicalize().unwrap_or_else(|_| absolute(path));
    let relative = data_dir.and_then(|data_dir| {
        let relative = resolved(folder).strip_prefix(resolved(data_dir)).ok()?.to_owned();
        // The same on every system: a data folder can be copied to another one.
        let names =
            relative.components().map(|part| part.as_os_str().to_str()).collect::<Option<Vec<_>>>()?;
        (!names.is_empty()).then(|| names.join("/"))
    });
    relative.unwrap_or_else(|| absolute(folder).display().to_string())
}

/// Where a capture is that a record names. Earlier versions wrote absolute paths: if such a path is not in the data folder, the
/// folder was copied or moved, and the capture is where the end of the path leads to.
pub fn locate_capture(note: &str, data_dir: &Path) -> CaptureLocation {
    let path = Path::new(note);
    let names: Vec<&std::ffi::OsStr> = path
        .components()
        .filter_map(|part| match part {
            Component::Normal(name) => Some(name),
            _ => None,
        })
        .collect();
    let own = if path.is_relative() {
        let is_plain = path.components().all(|part| matches!(part, Component::Normal(_)));
        is_plain.then(|| data_dir.join(path))
    } else if path.starts_with(data_dir) || is_within(path, data_dir) {
        Some(path.to_owned())
    } else {
        let ends = (1..names.len().saturating_sub(1)).map(|from| names[from..].iter().collect::<PathBuf>());
        ends.map(|end| data_dir.join(end)).find(|folder| has_capture(folder))
    };
    match own {
        // A link in the data folder may lead out of it.
        Some(folder) if !folder.exists() || is_within(&folder, data_dir) => CaptureLocation::Own(folder),
        Some(folder) => CaptureLocation::Outside(folder),
        None => CaptureLocation::Outside(path.to_owned()),
    }
}

/// Whether a folder has files of a capture.
pub fn has_capture(folder: &Path) -> bool {
    CAPTURE_FILES.iter().any(|file| folder.join(file).is_file())
}

fn is_within(path: &Path, data_dir: &Path) -> bool {
    match (path.canonicalize(), data_dir.canonicalize()) {
        (Ok(path), Ok(data_dir)) => path.starts_with(data_dir),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_capture(folder: &Path) -> PathBuf {
        std::fs::create_dir_all(folder).expect("the folder is created");
        std::fs::write(folder.join("capture.json"), "{}").expect("the file is written");
        folder.to_owned()
    }

    #[test]
    fn capture_notes_are_relative_to_the_data_folder() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let data = home.path().join("data");
        let own = write_capture(&data.join("captures/12ab/turn-1"));
        assert_eq!(capture_note(&own, Some(&data)), "captures/12ab/turn-1");
        assert_eq!(locate_capture("captures/12ab/turn-1", &data), CaptureLocation::Own(own));
        let outside = write_capture(&home.path().join("elsewhere/turn-1"));
        let note = capture_note(&outside, Some(&data));
        assert_eq!(note, outside.display().to_string());
        assert_eq!(locate_capture(&note, &data), CaptureLocation::Outside(outside.clone()));
        assert_eq!(capture_note(&outside, None), note);
        for note in ["../elsewhere/turn-1", "captures/../../elsewhere/turn-1"] {
            assert_eq!(locate_capture(note, &data), CaptureLocation::Outside(note.into()), "{note}");
        }
    }

    #[test]
    fn capture_notes_with_absolute_paths_lead_to_the_own_folder() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let [old, new] = ["old", "new"].map(|name| home.path().join(name));
        let other = write_capture(&old.join("captures/12ab/turn-1"));
        let own = write_capture(&new.join("captures/12ab/turn-1"));
        let note = other.display().to_string();
        assert_eq!(locate_capture(&note, &old), CaptureLocation::Own(other.clone()));
        assert_eq!(locate_capture(&note, &new), CaptureLocation::Own(own.clone()));
        std::fs::remove_dir_all(&own).expect("the capture is removed");
        assert_eq!(locate_capture(&note, &new), CaptureLocation::Outside(other));
    }

    #[cfg(unix)]
    #[test]
    fn capture_behind_a_link_is_outside_of_the_data_folder() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let data = home.path().join("data");
        write_capture(&home.path().join("elsewhere/turn-1"));
        std::fs::create_dir_all(&data).expect("the folder is created");
        std::os::unix::fs::symlink(home.path().join("elsewhere"), data.join("link"))
            .expect("the link is made");
        let found = locate_capture("link/turn-1", &data);
        assert_eq!(found, CaptureLocation::Outside(data.join("link/turn-1")));
    }
}
