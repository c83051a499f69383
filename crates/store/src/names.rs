//! Names of conversations. A namespace of rows is stored under a name that no conversation can have.

use crate::sql::SqlError;

/// The prefix of the stored name of a namespace. Worlds of rooms are the only namespaces so far, and the prefix is part of
/// the stored format.
const NAMESPACE_PREFIX: &str = "world:";
const MAX_NAME_BYTES: usize = 200;

/// Checks what holds for stored names of conversations and namespaces.
pub(crate) fn check_name(name: &str) -> Result<(), SqlError> {
    let one_line = !name.chars().any(char::is_control) && name.trim() == name;
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !one_line {
        let why =
            format!("a name is 1 to {MAX_NAME_BYTES} bytes of text on one line, without spaces at its ends");
        return Err(SqlError::invalid_input(why));
    }
    Ok(())
}

/// Checks a name that a conversation is to have.
pub(crate) fn check_conversation_name(name: &str) -> Result<(), SqlError> {
    check_name(name)?;
    check_not_reserved(name)
}

/// Checks that a name is not one of those that namespaces are stored under.
pub(crate) fn check_not_reserved(name: &str) -> Result<(), SqlError> {
    if is_namespace(name) {
        return Err(SqlError::invalid_input(format!(
            "names that begin with '{NAMESPACE_PREFIX}' belong to worlds of rooms: choose another name"
        )));
    }
    Ok(())
}

pub(crate) fn is_namespace(name: &str) -> bool {
    namespace_of(name).is_some()
}

/// The name that a namespace is stored under.
pub(crate) fn stored_name(namespace: &str) -> String {
    format!("{NAMESPACE_PREFIX}{namespace}")
}

/// The namespace that is stored under `name`; none if it is a conversation.
pub(crate) fn namespace_of(name: &str) -> Option<&str> {
    name.strip_prefix(NAMESPACE_PREFIX)
}

/// The error for a name that already belongs to a conversation or a world.
pub(crate) fn name_taken(name: &str) -> SqlError {
    let (what, name) = namespace_of(name).map_or(("conversation", name), |world| ("world", world));
    SqlError::conflict(format!("there is a {what} '{name}' already: choose another name"))
}

/// PostgreSQL cannot store U+0000 in text; SQLite could, but a store must be movable from one to the other.
pub(crate) fn check_record_text(key: &str, value: Option<&str>) -> Result<(), SqlError> {
    if key.contains('\0') || value.is_some_and(|value| value.contains('\0')) {
        return Err(SqlError::invalid_input("a record cannot contain the character U+0000"));
    }
    Ok(())
}
