//! The reference page of the settings, made from their table.

use super::load::variable;
use super::value::Preset;
use super::{KEYS, Settings, preset};
use std::fmt::Write;

/// The page, in Markdown.
#[must_use]
pub fn page() -> String {
    let mut out = String::from(
        "# Settings\n\n\
         This page is printed by `halo config reference`; a test keeps it true.\n\n\
         A setting comes from, later ones winning: its default, what a capture recorded (for `halo replay`), the \
         preset, the settings file (`config.toml` in \
         the data folder, or `--config FILE`), the environment (`HALO_CONTEXT_MAX_TOKENS`), `--set KEY=VALUE`. \
         `halo config` shows what is in force and where it came from.\n\n\
         ```toml\n[context]\nmax_tokens = 4000\n\n[brightness]\nrank = \"peak\"\n```\n",
    );
    let defaults = Settings::default();
    let mut section = "";
    for key in KEYS {
        let own = key.name.split('.').next().unwrap_or_default();
        if own != section {
            section = own;
            let _ = write!(
                out,
                "\n## {section}\n\n| key | default | allowed | what it does |\n|---|---|---|---|\n"
            );
        }
        let (default, _) = defaults.get(key.name).unwrap_or_default();
        let doc = key.doc.split_whitespace().collect::<Vec<_>>().join(" ");
        let _ = writeln!(out, "| `{}` | {default} | {} | {doc} |", key.name, (key.allowed)());
    }
    out.push_str("\n## Presets\n\nWhat each sets; naming one leaves nothing of another. `halo` is what there is without a preset.\n\n| preset | sets |\n|---|---|\n");
    for name in [Preset::Halo, Preset::HaloWeave, Preset::HaloV0] {
        let sets: Vec<_> = preset(name).iter().map(|(key, value)| format!("`{key} = {value}`")).collect();
        let _ = writeln!(out, "| {name} | {} |", sets.join(", "));
    }
    let _ = write!(
        out,
        "\n## Environment\n\nA key's variable is its name in capitals with `HALO_` before it and `_` for the dot: \
         `{}` sets `kv.ram`. `HALO_DATA` is the data folder, as `--data`.\n",
        variable("kv.ram")
    );
    out
}
