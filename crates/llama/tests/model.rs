//! The real model: it reads, it looks, and what is taken out of its memory goes back bit by bit.

mod common;

use common::{file, weights};
use halo_core::attention::Layers;
use halo_llama::attention::{Rows, Want};
use halo_llama::ffi::{Context, Item, LlamaError, Pos, Seq, Shape, Token, Weights};
use halo_llama::gguf;

const MAIN: Seq = Seq(0);
const SPARE: Seq = Seq(1);

fn context() -> Context {
    Context::new(&weights(), Shape { tokens: 1024, batch: 256, threads: 1, sequences: 4 })
        .expect("there is room")
}

/// Reads tokens from a position on; returns the guess at what follows the last.
fn read(context: &mut Context, seq: Seq, tokens: &[Token], from: Pos) -> Vec<f32> {
    for (batch, start) in tokens.chunks(256).zip((from..).step_by(256)) {
        let end = from as usize + tokens.len() - 1;
        let item = |(i, &token): (usize, &Token)| {
            let position = start + i as Pos;
            Item { token, position, logits: position as usize == end }
        };
        let items: Vec<Item> = batch.iter().enumerate().map(item).collect();
        context.decode(seq, &items).expect("it reads");
    }
    context.guess().to_vec()
}

const STORY: &str = "There is a gun on the wall above the fireplace, an old one. It rained from morning on, the guests came \
                     late and wet, and nobody spoke of the will. In the third act the brother takes the gun from the wall.";

#[test]
fn text_comes_back_from_tokens() {
    let weights = weights();
    for text in
        [STORY, "谢谢 🌱 naïve\n\n```rust\nfn main() {}\n```", "", " ", "<|im_start|>user\nHi<|im_end|>\n"]
    {
        let bytes: Vec<u8> =
            weights.tokenize(text, false).iter().flat_map(|&t| weights.bytes(t, false)).collect();
        assert_eq!(String::from_utf8(bytes).expect("text"), text, "as plain text");
    }
    let special = weights.tokenize("<|im_start|>user\nHi<|im_end|>", true);
    assert!(weights.is_mark(special[0]) && weights.ends(*special.last().expect("some")), "{special:?}");
    assert!(
        weights.bytes(special[0], false).is_empty() && weights.bytes(special[0], true) == b"<|im_start|>"
    );
    assert!(weights.template().is_some_and(|t| t.contains("im_start")));
    assert_eq!((weights.layers(), weights.no_surgery(), weights.trained_context()), (30, None, 8192));
    assert!(weights.bytes(-1, true).is_empty() && weights.bytes(i32::MAX, true).is_empty());
}

#[test]
fn attention_of_all_layers_sums_to_one_and_changes_nothing() {
    let tokens = weights().tokenize(STORY, false);
    let (plain, mut watched) = (read(&mut context(), MAIN, &tokens, 0), context());
    let wants = [(Layers::Mean, true), (Layers::Last, false), (Layers::These(vec![3, 7]), true)];
    for (layers, max_heads) in wants {
        let _ = watched.remove(MAIN, -1, -1);
        watched.tap().want(Want {
            rows: Rows::All,
            layers: layers.clone(),
            max: max_heads,
            full: false,
            cells: true,
            seen: true,
        });
        assert_eq!(read(&mut watched, MAIN, &tokens, 0), plain, "looking changes nothing");
        let cells: Vec<i64> = watched.tap().cells().to_vec();
        assert_eq!(cells.len(), tokens.len());
        let looks = watched.tap().looks();
        assert_eq!(looks.len(), tokens.len(), "{layers:?}");
        for (n, look) in looks.iter().enumerate() {
            let sum: f32 = look.mean.iter().sum();
            assert!((sum - 1.0).abs() < 1e-5, "{layers:?}: token {n} looks at {sum}");
            let ahead: f32 = cells[n + 1..].iter().map(|&c| look.mean[c as usize]).sum();
            assert_eq!(ahead, 0.0, "nobody sees ahead");
            assert_eq!(look.max.len(), if max_heads { look.mean.len() } else { 0 });
        }
    }
    watched.tap().want(Want::nothing());
    let _ = watched.remove(MAIN, -1, -1);
    read(&mut watched, MAIN, &tokens, 0);
    assert!(watched.tap().looks().is_empty());
}

/// Cells that were saved, freed and put back at their own positions: the next guess is the same to the last bit.
#[test]
fn what_was_taken_out_goes_back_bit_by_bit() {
    let tokens = weights().tokenize(STORY, false);
    let (story, question) = tokens.split_at(tokens.len() - 1);
    let mut untouched = context();
    read(&mut untouched, MAIN, story, 0);
    let expected = read(&mut untouched, MAIN, question, story.len() as Pos);
    let mut context = context();
    read(&mut context, MAIN, story, 0);
    let (start, end) = (10, 30);
    context.share(MAIN, SPARE, start, end);
    let saved = context.save(SPARE);
    assert!(context.remove(SPARE, -1, -1) && context.remove(MAIN, start, end));
    // A fork that speaks meanwhile leaves no trace.
    context.share(MAIN, Seq(2), -1, -1);
    let alone = read(&mut context, Seq(2), question, story.len() as Pos);
    assert!(context.remove(Seq(2), -1, -1));
    assert_ne!(alone, expected, "without the paragraph it guesses otherwise");
    context.restore(SPARE, &saved).expect("it fits");
    context.share(SPARE, MAIN, -1, -1);
    assert!(context.remove(SPARE, -1, -1));
    assert_eq!(read(&mut context, MAIN, question, story.len() as Pos), expected);
    assert!(matches!(context.restore(SPARE, &saved[..saved.len() / 2]), Err(LlamaError::State(_))));
}

#[test]
fn what_cannot_be_is_an_error() {
    let weights = weights();
    let shape = Shape { tokens: 9000, batch: 64, threads: 1, sequences: 1 };
    assert!(matches!(Context::new(&weights, shape), Err(LlamaError::TooLong { asked: 9000, most: 8192 })));
    let mut context = context();
    assert!(context.decode(MAIN, &[]).is_err());
    assert!(context.decode(MAIN, &[Item { token: 1 << 30, position: 0, logits: true }]).is_err());
    assert!(context.decode(MAIN, &[Item { token: -5, position: 0, logits: true }]).is_err());
}

/// Damaged headers and noise in the place of a model: an error each time, told by the header's own check.
#[test]
fn damaged_files_are_refused() {
    let good = std::fs::read(file()).expect("there");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let mut state = 7u64;
    let mut dice = |sides: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % sides.max(1)
    };
    for n in 0..300 {
        let len = if n % 3 == 0 { dice(good.len().min(1 << 21)) } else { 1 << 16 };
        let mut bytes = good[..len].to_vec();
        for _ in 0..dice(8) {
            let at = dice(len.min(4096));
            bytes[at] = dice(256) as u8;
        }
        std::fs::write(&path, &bytes).expect("written");
        // All are far shorter than what they claim to hold.
        assert!(gguf::read(&path).is_err());
        assert!(matches!(Weights::load(&path, 0), Err(LlamaError::File { .. })));
    }
    for noise in [&b""[..], b"GGUF", b"GGUF\x03\0\0\0", &[0; 4096], b"not a model at all"] {
        std::fs::write(&path, noise).expect("written");
        assert!(matches!(Weights::load(&path, 0), Err(LlamaError::File { .. })));
    }
    let whole = gguf::read(&file()).expect("it is whole");
    assert_eq!(whole.values.get("general.architecture"), Some(&gguf::Value::Text("llama".into())));
}
