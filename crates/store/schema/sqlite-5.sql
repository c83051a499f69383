-- Version 5. Which process may write a conversation or a world. A transaction that writes one checks that the epoch is still
-- its own: a process that was paused for longer than its lease changes nothing. A row stays when its conversation is erased,
-- so that no epoch occurs twice.

CREATE TABLE lease (
    key     INTEGER PRIMARY KEY,    -- hash of the stored name
    owner   TEXT    NOT NULL,       -- the process that took it last
    epoch   INTEGER NOT NULL,       -- how often it was taken
    until   INTEGER NOT NULL,       -- the end of the lease, by the clock of the database; 0: released
    written INTEGER NOT NULL        -- random number of the last transaction under it: tells whether it was committed
);
