//! Texts in which a character is repeated: llama.cpp's regular expressions recurse once per character of a match.

use crate::common::TinyModel;
use halo_llama::ffi::ModelWeights;
use halo_llama::token_text::tokenize_with_text;

/// The stack of the threads that serve requests.
const STACK_BYTES: usize = 2 << 20;

/// Splitting texts into words by regular expression, which llama.cpp does for all of these, ended the process before.
#[test]
fn tokenize_of_long_runs_does_not_overflow_the_stack() {
    let bytes = std::fs::read(TinyModel::Llama.path()).expect("the model is read");
    let own = b"tokenizer.ggml.pre\x08\0\0\0\x06\0\0\0\0\0\0\0smollm";
    let at =
        bytes.windows(own.len()).position(|window| window == own).expect("the name of the pre-tokenizer");
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["tekken", "gpt-4o"] {
        let mut patched = bytes.clone();
        patched[at + own.len() - name.len()..at + own.len()].copy_from_slice(name.as_bytes());
        let path = folder.path().join(format!("{name}.gguf"));
        std::fs::write(&path, patched).expect("written");
        let weights = ModelWeights::load(&path, 0).expect("the model loads");
        let tokenize = move || {
            for run in ["A", "aB", "a1", "7", ".", "(<", " ", "\n", " \n", "字", "e\u{301}", "'s"] {
                let text = format!("Look: {} end", run.repeat(200_000 / run.len()));
                let tokens = tokenize_with_text(&weights, &text, false);
                let joined: String = tokens.iter().map(|token| token.text.as_str()).collect();
                assert!(joined == text, "{run:?}: the text is changed");
            }
        };
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(tokenize);
        thread.expect("a thread").join().expect("the text is tokenized");
    }
}
