//! The test of KV cell editing when a model is loaded.

use crate::common::{STORY, TinyModel, context_params, tiny_model_path, tokenize_chunks};
use crate::generate::{NEVER, generate, greedy};
use halo_core::attention::{AttentionRequest, LayerReduction};
use halo_core::model::Model;
use halo_llama::ffi::{AttentionSource, KvKeyType, LlamaContext, ModelWeights, SeqId};
use halo_llama::kv_archive::KvArchiveLimits;
use halo_llama::model::{Llama, LlamaOptions};
use halo_llama::self_test::{SELF_TEST_FAILED, SelfTestRestore, stored_result, test_with_damage};
use std::path::Path;
use std::sync::Arc;

fn open_model(model: TinyModel, folder: &Path) -> Llama {
    let options = LlamaOptions {
        context: Some(512),
        kv_archive: KvArchiveLimits { ram: 1 << 30, disk: 0, folder: None },
        self_tests: Some(folder.to_owned()),
        ..LlamaOptions::default()
    };
    Llama::open(&model.path(), &options).expect("the model loads")
}

/// Every kind of model passes. A model that failed before reads the window again after each change, and answers the same.
#[test]
fn self_test_decides_whether_kv_cells_are_edited() {
    let window = tokenize_chunks(&STORY[..5]);
    let without = [window[0].clone(), window[1].clone(), window[3].clone(), window[4].clone()].concat();
    let window = window.concat();
    for model in [
        TinyModel::Llama,
        TinyModel::Gemma3,
        TinyModel::GptOss,
        TinyModel::Lfm2,
        TinyModel::GraniteHybrid,
        TinyModel::Qwen2Vl,
        TinyModel::Qwen35,
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut passed = open_model(model, folder.path());
        assert_eq!(passed.kv_edit_unsupported(), None, "{model:?}");
        let answer = |llama: &mut Llama, window: &[_]| {
            let (end, steps) = generate(llama, window, &greedy(6), &AttentionRequest::none(), false, NEVER);
            end.expect("an answer");
            (steps.ids, steps.stats.expect("figures").prefilled)
        };
        let (expected, prefilled) = answer(&mut passed, &window);
        assert_eq!(prefilled, window.len(), "the test leaves nothing in the KV cache");
        assert_eq!(answer(&mut passed, &without).1, 1, "{model:?}");

        let files: Vec<_> = std::fs::read_dir(folder.path()).expect("a folder").flatten().collect();
        assert_eq!(files.len(), 1, "{model:?}");
        assert_eq!(std::fs::read(files[0].path()).expect("read"), b"1 passed\n");
        std::fs::write(files[0].path(), b"1 failed\n").expect("written");
        let mut failed = open_model(model, folder.path());
        assert_eq!(failed.kv_edit_unsupported(), Some(SELF_TEST_FAILED));
        assert_eq!(answer(&mut failed, &window), (expected, window.len()), "{model:?}");
        assert!(answer(&mut failed, &without).1 > 1, "{model:?} reads the rest again");
    }
}

/// The table of docs/models.md: architecture, attention, KV edits.
fn documented_architectures() -> Vec<(String, String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/models.md");
    let text = std::fs::read_to_string(path).expect("docs/models.md");
    let rows = text.lines().filter_map(|line| {
        let cells: Vec<&str> = line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ").collect();
        match cells.as_slice() {
            [architecture, _, attention, kv_edits] => {
                Some(((*architecture).to_owned(), (*attention).to_owned(), (*kv_edits).to_owned()))
            }
            _ => None,
        }
    });
    rows.filter(|(architecture, ..)| architecture != "architecture").collect()
}

/// Each small model is loaded, tested, and answers; what it can do is what docs/models.md says.
#[test]
fn self_test_verdict_of_each_architecture_is_as_documented() {
    let documented = documented_architectures();
    assert!(documented.len() >= 12, "{documented:?}");
    let window = tokenize_chunks(&STORY[..3]).concat();
    for (architecture, attention, kv_edits) in documented {
        let folder = tempfile::tempdir().expect("a folder");
        let options = LlamaOptions {
            context: Some(512),
            self_tests: Some(folder.path().to_owned()),
            ..LlamaOptions::default()
        };
        let path = tiny_model_path(&architecture);
        let mut llama = Llama::open(&path, &options).expect("the model loads");
        let capabilities = llama.info().capabilities();
        let found = match capabilities.kv_editing.reason() {
            None => "yes".to_owned(),
            Some(reason) => format!("no: {reason}"),
        };
        assert_eq!(found, kv_edits, "{architecture}");
        assert_eq!(capabilities.kv_editing.edits_cells(), Some(kv_edits == "yes"), "{architecture}");
        assert_eq!(if capabilities.attention { "yes" } else { "no" }, attention, "{architecture}");
        // A model whose kind decides is not tested.
        let tested = (kv_edits == "yes").then_some(true);
        assert_eq!(
            stored_result(folder.path(), &path, KvKeyType::F16, AttentionSource::Softmax),
            tested,
            "{architecture}"
        );
        // The sum of a row is not 1 where a part goes to attention sinks: the maximum is not checked.
        let request =
            AttentionRequest { answer: true, layers: LayerReduction::Max, ..AttentionRequest::none() };
        let (end, steps) = generate(&mut llama, &window, &greedy(4), &request, false, NEVER);
        end.expect("an answer");
        let has_rows = steps.rows.iter().any(|row| row.is_some_and(|len| len > 0));
        assert_eq!(has_rows, capabilities.attention, "{architecture}");
    }
}

/// The test finds cells that are not put back, cells of other tokens, and a single flipped bit.
#[test]
fn self_test_fails_where_restored_cells_are_wrong() {
    for model in [TinyModel::Llama, TinyModel::Gemma3, TinyModel::Lfm2, TinyModel::Qwen2Vl] {
        let weights = Arc::new(ModelWeights::load(&model.path(), 0).expect("the model loads"));
        let mut context =
            LlamaContext::new(&weights, context_params(512, KvKeyType::F16)).expect("enough memory");
        let mut test = |restore| {
            let passed = test_with_damage(&mut context, restore).expect("computed");
            for seq in 0..3 {
                let _ = context.seq_rm(SeqId(seq), -1, -1);
            }
            passed
        };
        assert!(test(SelfTestRestore::Exact), "{model:?}");
        for damage in [SelfTestRestore::Nothing, SelfTestRestore::OtherTokens, SelfTestRestore::FlippedBit] {
            assert!(!test(damage), "{model:?}, {damage:?}");
        }
        assert!(test(SelfTestRestore::Exact), "{model:?}: nothing of the damage is left");
    }
}
