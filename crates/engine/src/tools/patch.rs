//! A JSON patch (RFC 6902) of a document, for a caller that nobody trusts.

use super::jq::LARGEST;
use json_patch::{PatchOperation, patch};
use serde_json::Value;

/// The most operations.
const MOST: usize = 100;

/// The document with a patch applied: all of it, or on an error nothing.
///
/// # Errors
/// Why it cannot be done, in words for whoever wrote the patch.
pub fn apply(document: &Value, text: &str) -> Result<Value, String> {
    if text.len() > LARGEST {
        return Err(format!("the patch is larger than {} KiB", LARGEST / 1024));
    }
    let operations: Vec<PatchOperation> =
        serde_json::from_str(text).map_err(|error| format!("this is no JSON patch: {error}"))?;
    if operations.len() > MOST {
        return Err(format!("the patch has more than {MOST} operations"));
    }
    let mut patched = document.clone();
    for operation in &operations {
        patch(&mut patched, std::slice::from_ref(operation)).map_err(|error| error.to_string())?;
        // One that copies doubles what there is, and the next one that.
        if size(&patched) > LARGEST {
            return Err(format!("the file would be larger than {} KiB", LARGEST / 1024));
        }
    }
    Ok(patched)
}

/// About how many bytes a document takes as text.
pub fn size(value: &Value) -> usize {
    match value {
        Value::Object(map) => map.iter().map(|(key, value)| key.len() + 4 + size(value)).sum::<usize>() + 2,
        Value::Array(all) => all.iter().map(|value| size(value) + 1).sum::<usize>() + 2,
        Value::String(text) => text.len() + 2,
        _ => 8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_patch_is_applied_or_refused() {
        let notes = json!({"context": {}, "list": [1]});
        let add =
            r#"[{"op":"add","path":"/context/name","value":"Ada"},{"op":"add","path":"/list/-","value":2}]"#;
        assert_eq!(apply(&notes, add), Ok(json!({"context": {"name": "Ada"}, "list": [1, 2]})));
        for wrong in [
            r#"[{"op":"remove","path":"/nothing"}]"#,
            r#"[{"op":"add","path":"/context/a","value":1},{"op":"test","path":"/list","value":2}]"#,
            r#"{"op":"add"}"#,
            "nonsense",
        ] {
            assert!(apply(&notes, wrong).is_err(), "{wrong}");
        }
        let double = r#"{"op":"copy","from":"/list","path":"/list/-"}"#;
        let doubles = format!("[{}]", vec![double; 60].join(","));
        assert!(apply(&notes, &doubles).is_err_and(|why| why.contains("larger than")));
    }
}
