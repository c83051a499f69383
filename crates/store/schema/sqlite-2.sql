-- Version 2. A vector says what it was made of, so that one of what a chunk no longer says is known as such.

ALTER TABLE embedding ADD COLUMN source INTEGER NOT NULL DEFAULT 0; -- sum of the text that was embedded
