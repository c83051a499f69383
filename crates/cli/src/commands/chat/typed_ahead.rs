//! What is typed while an answer is printed. The terminal does not show it then, and the next line begins with it.

use std::cell::RefCell;
use std::io::Write;

/// As much is read at most: a file that is pasted.
const MAX_TYPED_BYTES: usize = 1 << 20;

/// While it exists, the terminal does not show what is typed, and says what is pasted. On systems other than Unix, the line
/// editor receives what is typed.
pub struct HiddenInput {
    typed: RefCell<Vec<u8>>,
}

impl HiddenInput {
    pub fn begin() -> Self {
        if terminal_modes::hide() {
            set_bracketed_paste(true);
        }
        Self { typed: RefCell::default() }
    }

    /// Takes what was typed so far: a terminal whose buffer is full does not hear Ctrl-C.
    pub fn drain(&self) {
        let mut typed = self.typed.borrow_mut();
        while typed.len() < MAX_TYPED_BYTES && terminal_modes::read_waiting(&mut typed) {}
    }

    /// What was typed since the beginning, behind what was typed before.
    pub fn end(self, before: String) -> TypedText {
        self.drain();
        TypedText::from_keys(before, &String::from_utf8_lossy(&self.typed.borrow()))
    }
}

impl Drop for HiddenInput {
    fn drop(&mut self) {
        restore_terminal();
    }
}

/// Shows again what is typed, also where the program ends within an answer.
pub fn restore_terminal() {
    if terminal_modes::restore() {
        set_bracketed_paste(false);
    }
}

fn set_bracketed_paste(on: bool) {
    print!("\x1b[?2004{}", if on { 'h' } else { 'l' });
    let _ = std::io::stdout().flush();
}

#[cfg(unix)]
mod terminal_modes {
    use parking_lot::Mutex;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::stdio::stdin;
    use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

    /// How the terminal was before its input was hidden.
    static SAVED: Mutex<Option<Termios>> = Mutex::new(None);

    pub fn hide() -> bool {
        let Ok(modes) = tcgetattr(stdin()) else { return false };
        let mut hidden = modes.clone();
        hidden.local_modes.remove(LocalModes::ECHO | LocalModes::ICANON);
        // Ctrl-C stops the answer and keeps what was typed.
        hidden.local_modes.insert(LocalModes::NOFLSH);
        *SAVED.lock() = Some(modes);
        tcsetattr(stdin(), OptionalActions::Now, &hidden).is_ok()
    }

    pub fn restore() -> bool {
        let saved = SAVED.lock().take();
        saved.is_some_and(|modes| tcsetattr(stdin(), OptionalActions::Now, &modes).is_ok())
    }

    /// Appends bytes that wait to be read; false if there are none.
    pub fn read_waiting(bytes: &mut Vec<u8>) -> bool {
        let stdin = stdin();
        let mut one = [PollFd::new(&stdin, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if !poll(&mut one, Some(&now)).is_ok_and(|n| n > 0) {
            return false;
        }
        let mut buffer = [0; 4096];
        match rustix::io::read(stdin, &mut buffer) {
            Ok(n) if n > 0 => bytes.extend_from_slice(&buffer[..n]),
            _ => return false,
        }
        true
    }
}

#[cfg(not(unix))]
mod terminal_modes {
    pub fn hide() -> bool {
        false
    }

    pub fn restore() -> bool {
        false
    }

    pub fn read_waiting(_: &mut Vec<u8>) -> bool {
        false
    }
}

/// Lines that were entered, and the beginning of the next one.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TypedText {
    pub lines: Vec<String>,
    pub rest: String,
}

impl TypedText {
    /// Reads keys as a line editor does that knows backspace only. Arrows and other keys that send an escape sequence are ignored.
    fn from_keys(before: String, keys: &str) -> Self {
        let mut typed = Self { lines: Vec::new(), rest: before };
        let mut pasted = false;
        let mut keys = keys.chars().peekable();
        while let Some(key) = keys.next() {
            match key {
                '\n' | '\r' if pasted => typed.rest.push('\n'),
                '\n' | '\r' => typed.lines.push(std::mem::take(&mut typed.rest)),
                '\u{7f}' | '\u{8}' => drop(typed.rest.pop()),
                '\u{15}' => typed.rest.clear(),
                // Alt+Enter begins another line of the message.
                '\u{1b}' if keys.next_if(|key| matches!(key, '\n' | '\r')).is_some() => typed.rest.push('\n'),
                '\u{1b}' => {
                    // ESC [ 1 ; 5 C, or ESC and one key; a paste is between ESC [ 200 ~ and ESC [ 201 ~.
                    let mut code = String::new();
                    if keys.next_if(|key| matches!(key, '[' | 'O')).is_some() {
                        while let Some(key) = keys.next_if(|key| matches!(key, ' '..='?')) {
                            code.push(key);
                        }
                    }
                    match (code.as_str(), keys.next()) {
                        ("200", Some('~')) => pasted = true,
                        ("201", Some('~')) => pasted = false,
                        _ => {}
                    }
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
        for (before, keys, lines, rest) in [
            ("", "", &[][..], ""),
            ("", "and then", &[], "and then"),
            ("", "one\ntwo\nthr", &["one", "two"], "thr"),
            ("unfin", "ished\nnext", &["unfinished"], "next"),
            ("wrong", "\u{15}right", &[], "right"),
            ("", "abc\u{7f}\u{7f}xyz\r", &["axyz"], ""),
            ("", "\u{7f}a", &[], "a"),
            ("", "a\u{1b}[Ab\u{1b}[1;5Cc\u{1b}OHd\u{1b}be\u{4}", &[], "abcde"),
            ("", "one\u{1b}\rtwo\r", &["one\ntwo"], ""),
            ("", "\u{1b}[200~a\rb\u{1b}[201~ c\rd", &["a\nb c"], "d"),
            ("ümlaut", "\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}ok", &[], "ok"),
        ] {
            let typed = TypedText::from_keys(before.to_owned(), keys);
            let lines = lines.iter().map(|line| (*line).to_owned()).collect();
            assert_eq!(typed, TypedText { lines, rest: rest.to_owned() }, "{keys:?}");
        }
    }
}
