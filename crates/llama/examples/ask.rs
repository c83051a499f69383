//! Asks a model one or more questions in one conversation, and prints the cache statistics of each:
//! `cargo run --release -p halo-llama --example ask -- MODEL QUESTION…`

use halo_core::attention::AttentionRequest;
use halo_core::model::{Model, ModelStep, Prompt, Sampling, StepFlow, WindowToken};
use halo_core::token::Position;
use halo_llama::kv_archive::KvArchiveLimits;
use halo_llama::model::{Llama, LlamaOptions};
use std::io::Write;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: ask MODEL QUESTION…")?;
    let kv_archive = KvArchiveLimits { ram: 1 << 30, disk: 0, folder: None };
    let threads = std::thread::available_parallelism()?.get() as u32;
    let mut model =
        Llama::open(path.as_ref(), &LlamaOptions { threads, kv_archive, ..LlamaOptions::default() })?;
    let template = model.info().template.clone();
    println!("{} of {} tokens; {template:?}", model.info().name, model.info().context);
    if let Some(why) = model.kv_edit_unsupported() {
        println!("KV cells cannot be edited, because {why}");
    }
    let mut window: Vec<WindowToken> = Vec::new();
    let mut start = template.start.clone();
    for question in arguments {
        let text = format!(
            "{start}{}{question}{}{}",
            template.user.prefix, template.user.suffix, template.assistant.prefix
        );
        start = template.assistant.suffix.clone();
        for (n, token) in model.tokenize(&text, true)?.into_iter().enumerate() {
            let position = Some(Position(window.len() as u64));
            window.push(WindowToken { position, offset: 0, id: token.id, chunk_start: n == 0 });
        }
        let next_position = Position(window.len() as u64);
        let prompt = Prompt {
            conversation: "ask",
            window: &window,
            messages: &Vec::new,
            next_position,
            ephemeral: false,
        };
        let sampling = Sampling { max_tokens: 120, temperature: 0.0, ..Sampling::default() };
        let (mut answer, mut row_sums) = (Vec::new(), Vec::new());
        let finish = model.generate(&prompt, &sampling, &AttentionRequest::default(), &mut |step| {
            match step {
                ModelStep::PrefillDone(stats) => println!("\n{stats:?}"),
                ModelStep::Token(token, row) => {
                    print!("{}", token.text);
                    let _ = std::io::stdout().flush();
                    row_sums.extend(row.map(|row| row.mean.iter().sum::<f32>()));
                    answer.push(token.id);
                }
                _ => {}
            }
            StepFlow::Continue
        })?;
        println!(
            "\n{finish:?} after {} tokens; the first attention row sums to {:?}",
            answer.len(),
            row_sums.first()
        );
        for (n, id) in answer.into_iter().enumerate() {
            window.push(WindowToken {
                position: Some(next_position.plus(n)),
                offset: 0,
                id,
                chunk_start: n == 0,
            });
        }
    }
    Ok(())
}
