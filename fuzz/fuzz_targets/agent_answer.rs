//! Random answers of a room's agent, and random HUDs, in each format. The first byte selects the format and whether the answer
//! was truncated.

#![no_main]

use halo_worlds::answer::AgentAnswer;
use halo_worlds::format::{self, AnswerFormat, HudFormat};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, &str)| {
    let (selector, text) = input;
    let answer_format = if selector & 1 == 0 { AnswerFormat::Json } else { AnswerFormat::Toon };
    let _ = AgentAnswer::parse(text, answer_format, selector & 2 != 0);
    let hud_format = HudFormat::ALL[usize::from(selector >> 2) % HudFormat::ALL.len()];
    if let Ok(hud) = format::parse(text, hud_format) {
        let rendered = format::render(&hud, HudFormat::Json);
        let parsed = format::parse(&rendered, HudFormat::Json).expect("a rendered HUD is parsed");
        assert_eq!(parsed, hud);
    }
});
