//! A JSON patch (RFC 6902) of a document, for an untrusted caller.

use super::jq::MAX_DOCUMENT_BYTES;
use json_patch::{PatchOperation, patch};
use serde_json::Value;

const MAX_OPERATIONS: usize = 100;

/// Applies a patch: all of it, or on error nothing.
pub fn apply_patch(document: &Value, text: &str) -> Result<Value, String> {
    if text.len() > MAX_DOCUMENT_BYTES {
        return Err(format!("the patch is larger than {} KiB", MAX_DOCUMENT_BYTES / 1024));
    }
    let operations: Vec<PatchOperation> =
        serde_json::from_str(text).map_err(|error| format!("this is no JSON patch: {error}"))?;
    if operations.len() > MAX_OPERATIONS {
        return Err(format!("the patch has more than {MAX_OPERATIONS} operations"));
    }
    let mut patched = document.clone();
    for operation in &operations {
        patch(&mut patched, std::slice::from_ref(operation)).map_err(|error| error.to_string())?;
        // Every copy operation can double the document.
        let bytes = estimate_bytes(&patched);
        if bytes > MAX_DOCUMENT_BYTES && bytes >= estimate_bytes(document) {
            return Err(format!("the file would be larger than {} KiB", MAX_DOCUMENT_BYTES / 1024));
        }
    }
    Ok(patched)
}

/// About how many bytes a document takes as text.
pub fn estimate_bytes(value: &Value) -> usize {
    match value {
        Value::Object(map) => {
            map.iter().map(|(key, value)| key.len() + 4 + estimate_bytes(value)).sum::<usize>() + 2
        }
        Value::Array(all) => all.iter().map(|value| estimate_bytes(value) + 1).sum::<usize>() + 2,
        Value::String(text) => text.len() + 2,
        _ => 8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_patch_applies_fully_or_fails() {
        let notes = json!({"context": {}, "list": [1]});
        let add =
            r#"[{"op":"add","path":"/context/name","value":"Ada"},{"op":"add","path":"/list/-","value":2}]"#;
        assert_eq!(apply_patch(&notes, add), Ok(json!({"context": {"name": "Ada"}, "list": [1, 2]})));
        for invalid in [
            r#"[{"op":"remove","path":"/nothing"}]"#,
            r#"[{"op":"add","path":"/context/a","value":1},{"op":"test","path":"/list","value":2}]"#,
            r#"{"op":"add"}"#,
            "nonsense",
        ] {
            assert!(apply_patch(&notes, invalid).is_err(), "{invalid}");
        }
        let copy_op = r#"{"op":"copy","from":"/list","path":"/list/-"}"#;
        let patch = format!("[{}]", vec![copy_op; 60].join(","));
        assert!(apply_patch(&notes, &patch).is_err_and(|error| error.contains("larger than")));
    }
}
