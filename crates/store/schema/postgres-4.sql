-- Version 4. The turn that a log entry appends to, so that the start of every turn is found without reading the changes.
-- The migration fills the column of existing rows from their changes (src/schema.rs).

ALTER TABLE log ADD COLUMN turn BIGINT NOT NULL DEFAULT -1; -- -1: none, or that of the entry before; -2: several
-- Everything that such a query reads: it touches no page of the log itself.
CREATE INDEX log_turn ON log (key, turn, at) WHERE turn <> -1;
