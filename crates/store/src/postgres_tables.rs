//! The tables on PostgreSQL. Statements name them as on SQLite; here each gets its schema.

pub(crate) const TABLES: [&str; 9] =
    ["conversation", "chunk", "block", "log", "mention", "record", "embedding", "message", "lease"];

/// A statement with the schema before each table.
pub(crate) fn qualify(sql: &str) -> String {
    let mut qualified = String::with_capacity(sql.len() + 32);
    let mut before = "";
    for (n, word) in sql.split(' ').enumerate() {
        if n > 0 {
            qualified.push(' ');
        }
        let name = word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let introduces_table = ["FROM", "JOIN", "INTO", "UPDATE"].contains(&before);
        if introduces_table && (TABLES.contains(&name) || name == "version") {
            qualified.push_str("halo.");
        }
        qualified.push_str(word);
        if !word.is_empty() {
            before = word.trim_start_matches('(');
        }
    }
    qualified
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn postgres_statements_name_the_schema_of_each_table() {
        let cases = [
            (
                "SELECT log FROM log l JOIN mention m ON l.key = m.seq",
                "SELECT log FROM halo.log l JOIN halo.mention m ON l.key = m.seq",
            ),
            (
                "DELETE FROM block WHERE key IN (SELECT key FROM chunk)",
                "DELETE FROM halo.block WHERE key IN (SELECT key FROM halo.chunk)",
            ),
            (
                "INSERT INTO record (key) VALUES ($1) ON CONFLICT (key) DO UPDATE SET key = record.key",
                "INSERT INTO halo.record (key) VALUES ($1) ON CONFLICT (key) DO UPDATE SET key = record.key",
            ),
            ("UPDATE version SET version = $1", "UPDATE halo.version SET version = $1"),
            ("SELECT 1 FROM information_schema.tables", "SELECT 1 FROM information_schema.tables"),
        ];
        for (sql, expected) in cases {
            assert_eq!(qualify(sql), expected);
        }
    }
}
