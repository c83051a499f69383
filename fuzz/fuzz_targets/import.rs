//! Random files in the formats of other programs. The first byte selects the format. The result is a list of conversations or an
//! error.

#![no_main]

use halo_store::exchange::importers::{ImportFormat, detect_format, read};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&selector, file)) = data.split_first() else { return };
    let _ = detect_format(file, "chat.json");
    let format = ImportFormat::ALL[usize::from(selector) % ImportFormat::ALL.len()];
    let mut turns = 0;
    let _ = read(format, &mut &*file, &mut |conversation| {
        turns += conversation.turns.len();
        Ok(())
    });
    assert!(turns <= file.len(), "{turns} turns are in {} bytes", file.len());
});
