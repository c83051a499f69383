-- Version 1. Migrations only ever add: this file does not change any more.
-- A key is conversation × 2³² + place (of a chunk, of a block) or + number (of a log entry).

CREATE TABLE conversation (
    id      INTEGER PRIMARY KEY,
    name    TEXT    NOT NULL UNIQUE,
    model   TEXT    NOT NULL,          -- whose tokens these are; '' while no model has read them
    created INTEGER NOT NULL,          -- milliseconds since 1970, as all times
    used    INTEGER NOT NULL,
    seq     INTEGER NOT NULL,          -- number of the last log entry; never reused
    turns   INTEGER NOT NULL,
    places  INTEGER NOT NULL,          -- chunks, names that were merged away included
    tokens  INTEGER NOT NULL,          -- the next position; never reused
    live    INTEGER NOT NULL
);

-- One row for each chunk, live or dead; the tokens are one blob.
CREATE TABLE chunk (
    key          INTEGER PRIMARY KEY,
    conversation INTEGER NOT NULL,
    turn         INTEGER NOT NULL,
    sentence     INTEGER NOT NULL,
    role         TEXT    NOT NULL,     -- s, u, a
    live         INTEGER NOT NULL,     -- 1: in the window
    sum          INTEGER NOT NULL,     -- of the body
    body         BLOB    NOT NULL,
    UNIQUE (conversation, turn, sentence, role)
);
CREATE INDEX chunk_live ON chunk (conversation) WHERE live = 1;

-- What is known of each chunk beside its tokens, 128 to a block, so that ten million tokens open at once.
CREATE TABLE block (
    key   INTEGER PRIMARY KEY,
    sum   INTEGER NOT NULL,
    heads BLOB    NOT NULL
);

-- What happened, in order: from it alone all of the above can be made again.
CREATE TABLE log (
    key    INTEGER PRIMARY KEY,
    at     INTEGER NOT NULL,
    scores INTEGER NOT NULL,           -- 1: brightness was scored
    sum    INTEGER NOT NULL,
    change TEXT    NOT NULL
);

-- Which entries of the log name a chunk, and with them why it left and why it came back.
CREATE TABLE mention (
    conversation INTEGER NOT NULL,
    turn         INTEGER NOT NULL,
    sentence     INTEGER NOT NULL,
    role         TEXT    NOT NULL,
    seq          INTEGER NOT NULL,
    PRIMARY KEY (conversation, turn, sentence, role, seq)
) WITHOUT ROWID;

-- Notes, settings, captures and memories.
CREATE TABLE record (
    conversation INTEGER NOT NULL,
    kind         TEXT    NOT NULL,
    key          TEXT    NOT NULL,
    value        TEXT    NOT NULL,
    sum          INTEGER NOT NULL,     -- of the value
    at           INTEGER NOT NULL,
    PRIMARY KEY (conversation, kind, key)
);

CREATE TABLE embedding (
    conversation INTEGER NOT NULL,
    embedder     TEXT    NOT NULL,
    turn         INTEGER NOT NULL,
    sentence     INTEGER NOT NULL,
    role         TEXT    NOT NULL,
    at           INTEGER NOT NULL,
    sum          INTEGER NOT NULL,     -- of the vector
    vector       BLOB    NOT NULL,     -- f32, little-endian
    PRIMARY KEY (conversation, embedder, turn, sentence, role)
);
