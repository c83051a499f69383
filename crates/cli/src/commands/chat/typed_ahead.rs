//! What is typed while an answer is printed. The terminal does not show it then, and the next line begins with it.

#[cfg(unix)]
pub use unix::{HiddenInput, restore_terminal};

#[cfg(unix)]
mod unix {
    use super::TypedText;
    use parking_lot::Mutex;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::stdio::stdin;
    use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

    /// How the terminal was before its input was hidden.
    static SAVED: Mutex<Option<Termios>> = Mutex::new(None);

    /// As much is read at most: a file that is pasted.
    const MAX_TYPED_BYTES: usize = 1 << 20;

    /// While it exists, the terminal does not show what is typed.
    pub struct HiddenInput(());

    impl HiddenInput {
        pub fn begin() -> Self {
            if let Ok(modes) = tcgetattr(stdin()) {
                let mut hidden = modes.clone();
                hidden.local_modes.remove(LocalModes::ECHO | LocalModes::ICANON);
                // Ctrl-C stops the answer and keeps what was typed.
                hidden.local_modes.insert(LocalModes::NOFLSH);
                *SAVED.lock() = Some(modes);
                let _ = tcsetattr(stdin(), OptionalActions::Now, &hidden);
            }
            Self(())
        }

        /// What was typed since the beginning.
        pub fn end(self) -> TypedText {
            let (mut typed, mut buffer) = (Vec::new(), [0; 4096]);
            while typed.len() < MAX_TYPED_BYTES && has_input() {
                match rustix::io::read(stdin(), &mut buffer) {
                    Ok(n) if n > 0 => typed.extend_from_slice(&buffer[..n]),
                    _ => break,
                }
            }
            TypedText::from_keys(&String::from_utf8_lossy(&typed))
        }
    }

    impl Drop for HiddenInput {
        fn drop(&mut self) {
            restore_terminal();
        }
    }

    /// Shows again what is typed, also where the program ends within an answer.
    pub fn restore_terminal() {
        if let Some(modes) = SAVED.lock().take() {
            let _ = tcsetattr(stdin(), OptionalActions::Now, &modes);
        }
    }

    fn has_input() -> bool {
        let stdin = stdin();
        let mut one = [PollFd::new(&stdin, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut one, Some(&now)).is_ok_and(|n| n > 0)
    }
}

/// On other systems, the line editor receives what is typed.
#[cfg(not(unix))]
pub struct HiddenInput(());

#[cfg(not(unix))]
impl HiddenInput {
    pub fn begin() -> Self {
        Self(())
    }

    pub fn end(self) -> TypedText {
        TypedText::default()
    }
}

#[cfg(not(unix))]
pub fn restore_terminal() {}

/// Lines that were entered, and the beginning of the next one.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TypedText {
    pub lines: Vec<String>,
    pub rest: String,
}

impl TypedText {
    /// Reads keys as a line editor does that knows backspace only. Arrows and other keys that send an escape sequence are ignored.
    fn from_keys(keys: &str) -> Self {
        let mut typed = Self::default();
        let mut keys = keys.chars().peekable();
        while let Some(key) = keys.next() {
            match key {
                '\n' | '\r' => typed.lines.push(std::mem::take(&mut typed.rest)),
                '\u{7f}' | '\u{8}' => drop(typed.rest.pop()),
                '\u{15}' => typed.rest.clear(),
                '\u{1b}' => {
                    // ESC [ 1 ; 5 C, or ESC and one key.
                    if keys.next_if(|key| matches!(key, '[' | 'O')).is_some() {
                        while keys.next_if(|key| matches!(key, '0'..='?' | ' '..='/')).is_some() {}
                    }
                    keys.next();
                }
                '\t' => typed.rest.push(' '),
                key if key.is_control() => {}
                key => typed.rest.push(key),
            }
        }
        typed
    }
}

#[cfg(test)]
mod tests {
    use super::TypedText;

    #[test]
    fn keys_become_lines() {
        for (keys, lines, rest) in [
            ("", &[][..], ""),
            ("and then", &[], "and then"),
            ("one\ntwo\nthr", &["one", "two"], "thr"),
            ("abc\u{7f}\u{7f}xyz\r", &["axyz"], ""),
            ("\u{7f}a", &[], "a"),
            ("wrong\u{15}right", &[], "right"),
            ("a\u{1b}[Ab\u{1b}[1;5Cc\u{1b}OHd\u{1b}be\u{4}", &[], "abcde"),
            ("ümlaut\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}ok", &[], "ok"),
        ] {
            let typed = TypedText::from_keys(keys);
            assert_eq!(
                (typed.lines.as_slice(), typed.rest.as_str()),
                (lines.iter().map(|l| (*l).to_owned()).collect::<Vec<_>>().as_slice(), rest),
                "{keys:?}"
            );
        }
    }
}
