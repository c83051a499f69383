//! KoboldCPP's placeholders for the chat template of the model, which its front ends write into prompts: `{{[INPUT]}}`,
//! `{{[OUTPUT]}}` and `{{[SYSTEM]}}`, and the same with `_END`.

use halo_core::model::ChatTemplate;
use halo_core::token::Role;

const TAGS: [(&str, Role, bool); 6] = [
    ("{{[INPUT]}}", Role::User, false),
    ("{{[OUTPUT]}}", Role::Assistant, false),
    ("{{[SYSTEM]}}", Role::System, false),
    ("{{[INPUT_END]}}", Role::User, true),
    ("{{[OUTPUT_END]}}", Role::Assistant, true),
    ("{{[SYSTEM_END]}}", Role::System, true),
];

/// Replaces placeholders in the texts of one request, in their order: the memory, then the prompt.
pub(super) struct InstructTags<'a> {
    template: &'a ChatTemplate,
    /// Whether the texts close their messages themselves.
    has_ends: bool,
    /// The message that is open. Without closing placeholders, the next one closes it.
    open: Option<Role>,
}

impl<'a> InstructTags<'a> {
    /// None where the texts have no placeholder.
    pub fn find(template: &'a ChatTemplate, texts: &[&str]) -> Option<Self> {
        let has = |tag: &str| texts.iter().any(|text| text.contains(tag));
        let has_ends = TAGS.iter().any(|(tag, _, is_end)| *is_end && has(tag));
        TAGS.iter().any(|(tag, ..)| has(tag)).then_some(Self { template, has_ends, open: None })
    }

    pub fn replace(&mut self, text: &str) -> String {
        let (mut out, mut rest) = (String::with_capacity(text.len()), text);
        while let Some(at) = rest.find("{{[") {
            out.push_str(&rest[..at]);
            rest = &rest[at..];
            match TAGS.iter().find(|(tag, ..)| rest.starts_with(tag)) {
                Some((tag, role, is_end)) => {
                    self.push_tag(&mut out, *role, *is_end);
                    rest = &rest[tag.len()..];
                }
                None => {
                    out.push_str("{{[");
                    rest = &rest["{{[".len()..];
                }
            }
        }
        out.push_str(rest);
        out
    }

    fn push_tag(&mut self, out: &mut String, role: Role, is_end: bool) {
        if is_end {
            out.push_str(self.suffix(role));
            return;
        }
        if let Some(open) = self.open.replace(role).filter(|_| !self.has_ends) {
            out.push_str(self.suffix(open));
        }
        out.push_str(self.prefix(role));
    }

    /// A stop sequence that is a placeholder is the beginning of that message.
    pub fn stop_sequence(template: &ChatTemplate, stop: &str) -> Option<String> {
        let (_, role, is_end) = TAGS.iter().find(|(tag, ..)| stop.trim() == *tag)?;
        let tags = InstructTags { template, has_ends: true, open: None };
        let text = if *is_end { tags.suffix(*role) } else { tags.prefix(*role) };
        Some(text.to_owned())
    }

    /// A model without a chat template gets the headings of Alpaca, as in KoboldCPP.
    fn prefix(&self, role: Role) -> &'a str {
        match (self.template.is_empty(), role) {
            (false, role) => &self.template.wrap_for(role).prefix,
            (true, Role::Assistant) => "\n### Response:\n",
            (true, _) => "\n### Instruction:\n",
        }
    }

    fn suffix(&self, role: Role) -> &'a str {
        if self.template.is_empty() { "" } else { &self.template.wrap_for(role).suffix }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replaced(template: &ChatTemplate, memory: &str, prompt: &str) -> String {
        match InstructTags::find(template, &[memory, prompt]) {
            Some(mut tags) => format!("{}{}", tags.replace(memory), tags.replace(prompt)),
            None => format!("{memory}{prompt}"),
        }
    }

    #[test]
    fn instruct_tags_become_the_chat_template() {
        let chatml = ChatTemplate::chatml();
        let cases = [
            ("", "{{[INPUT]}}Hi{{[OUTPUT]}}", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
            (
                "",
                "{{[INPUT]}}Hi{{[INPUT_END]}}{{[OUTPUT]}}Ho{{[OUTPUT_END]}}",
                "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n",
            ),
            // The prompt closes the message of the memory.
            (
                "{{[SYSTEM]}}Be kind.",
                "{{[INPUT]}}Hi{{[OUTPUT]}}Ho",
                "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo",
            ),
            ("Once", " {{[X]}} {{[INPUT}} {{", "Once {{[X]}} {{[INPUT}} {{"),
            ("", "{{[{{[OUTPUT]}}", "{{[<|im_start|>assistant\n"),
        ];
        for (memory, prompt, expected) in cases {
            assert_eq!(replaced(&chatml, memory, prompt), expected, "{memory} {prompt}");
        }
        let bare = ChatTemplate::default();
        assert_eq!(
            replaced(&bare, "", "{{[INPUT]}}Hi{{[OUTPUT]}}"),
            "\n### Instruction:\nHi\n### Response:\n"
        );
        let stop = |text: &str| InstructTags::stop_sequence(&chatml, text);
        assert_eq!(stop("{{[INPUT]}}").as_deref(), Some("<|im_start|>user\n"));
        assert_eq!(stop("\n{{[OUTPUT_END]}}").as_deref(), Some("<|im_end|>\n"));
        assert_eq!(stop("User:"), None);
    }
}
