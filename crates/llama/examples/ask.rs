//! Asks a model one question, or several in a row: `cargo run --release -p halo-llama --example ask -- MODEL QUESTION…`

use halo_core::attention::Watch;
use halo_core::seams::{Flow, Model, ModelStep, Prompt, Sampling, Seen};
use halo_core::token::Position;
use halo_llama::graveyard::Room;
use halo_llama::model::{Llama, Options};
use std::io::Write;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("which model?")?;
    let room = Room { ram: 1 << 30, disk: 0, folder: None };
    let threads = std::thread::available_parallelism()?.get() as u32;
    let mut model = Llama::open(path.as_ref(), &Options { threads, room, ..Options::default() })?;
    let template = model.info().template.clone();
    println!("{} of {} tokens; {template:?}", model.info().name, model.info().context);
    if let Some(why) = model.rereads() {
        println!("what leaves its memory is read again, because {why}");
    }
    let mut window: Vec<Seen> = Vec::new();
    let mut start = template.start.clone();
    for question in arguments {
        let text = format!(
            "{start}{}{question}{}{}",
            template.user.before, template.user.after, template.assistant.before
        );
        start = template.assistant.after.clone();
        for (n, piece) in model.tokenize(&text, true)?.into_iter().enumerate() {
            let position = Some(Position(window.len() as u64));
            window.push(Seen { position, behind: 0, id: piece.id, begins: n == 0 });
        }
        let next = Position(window.len() as u64);
        let prompt = Prompt { conversation: "ask", window: &window, messages: &Vec::new, next, aside: false };
        let sampling = Sampling { max_tokens: 120, temperature: 0.0, ..Sampling::default() };
        let (mut said, mut most) = (Vec::new(), Vec::new());
        let end = model.generate(&prompt, &sampling, &Watch::default(), &mut |step| {
            match step {
                ModelStep::Ready(upkeep) => println!("\n{upkeep:?}"),
                ModelStep::Token(piece, look) => {
                    print!("{}", piece.text);
                    let _ = std::io::stdout().flush();
                    most.extend(look.map(|look| look.mean.iter().sum::<f32>()));
                    said.push(piece.id);
                }
                _ => {}
            }
            Flow::Continue
        })?;
        println!("\n{end:?} after {} tokens; rows sum to {:?} …", said.len(), most.first());
        for (n, id) in said.into_iter().enumerate() {
            window.push(Seen { position: Some(next.plus(n)), behind: 0, id, begins: n == 0 });
        }
    }
    Ok(())
}
