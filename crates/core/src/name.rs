//! Characters that names must not have.

/// Whether a character is invisible and changes how the text around it is shown: a control character, a line separator,
/// or a control of the text's direction. A name with one could look like another name.
#[must_use]
pub fn is_invisible_control(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}
