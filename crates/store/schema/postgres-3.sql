-- Version 3. Messages as clients of chat APIs know them, so that a history is found again without reading every
-- conversation. Derived data: the engine writes the rows of messages that have none.

CREATE TABLE message (
    conversation BIGINT NOT NULL,
    turn         BIGINT NOT NULL,
    role         TEXT    NOT NULL,     -- s, u, a
    exact        BIGINT NOT NULL,     -- hash of the trimmed text
    loose        BIGINT NOT NULL,     -- hash of the text without a speaker's name, white space collapsed
    name         BIGINT NOT NULL,     -- hash of the speaker's name in front of the text; 0: none
    length       BIGINT NOT NULL,     -- characters of what `loose` is a hash of
    prefix       BIGINT NOT NULL,     -- hash of this message and all before it on its path
    PRIMARY KEY (conversation, turn)
);
CREATE INDEX message_prefix ON message (prefix, conversation, turn);
CREATE INDEX message_loose ON message (loose, conversation, turn);
