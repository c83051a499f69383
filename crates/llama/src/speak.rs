//! One answer, from the window to the last token.

use crate::attention::{Row, Rows, Want};
use crate::ffi::{LlamaError, Sampler, Token};
use crate::key::Key;
use crate::mirror::{Mirror, MirrorError, Ready};
use crate::schema::Form;
use crate::text::{Letters, Stops};
use halo_core::attention::{PromptRows, Watch};
use halo_core::seams::{Finish, Flow, Look, ModelStep, Piece, Sampling, Seen};
use halo_core::token::{Position, TokenId};

/// What is asked.
pub(crate) struct Ask {
    pub(crate) conversation: String,
    pub(crate) window: Vec<Seen>,
    pub(crate) next: Position,
    pub(crate) aside: bool,
    pub(crate) sampling: Sampling,
    pub(crate) watch: Watch,
}

/// Answers, telling of every step.
pub(crate) fn speak(
    mirror: &mut Mirror,
    ask: &Ask,
    form: Option<Form>,
    tell: &mut dyn FnMut(ModelStep<'_>) -> Flow,
) -> Result<Finish, MirrorError> {
    let answer = ask.sampling.max_tokens;
    let ready = if ask.aside {
        mirror.fork(&ask.conversation, &ask.window, answer)
    } else {
        let mut reading = |done, of| tell(ModelStep::Reading { done, of });
        mirror.follow(&ask.conversation, &ask.window, answer, &mut reading)
    };
    let said = ready.and_then(|ready| {
        let first = read_end(mirror, ask, &ready, tell)?;
        match (first, tell(ModelStep::Ready(ready.upkeep))) {
            (Some(first), Flow::Continue) => go_on(mirror, ask, ready.room, first, form, tell),
            _ => Ok(Finish::Aborted),
        }
    });
    mirror.drop_fork();
    match said {
        // It was asked for.
        Err(MirrorError::Llama(LlamaError::Stopped)) => Ok(Finish::Aborted),
        said => said,
    }
}

/// Every head of what a step looked at, if it was asked for.
struct Seeing {
    row: Option<Row>,
    full: Vec<f32>,
}

impl Seeing {
    fn of(mirror: &mut Mirror, row: Option<Row>, watch: &Watch) -> Self {
        let full = if watch.full && row.is_some() { mirror.full() } else { Vec::new() };
        Self { row, full }
    }

    fn look(&self) -> Option<Look<'_>> {
        self.row.as_ref().map(|row| Look { mean: &row.mean, max: &row.max, full: &self.full })
    }
}

fn want(watch: &Watch, rows: Rows) -> Want {
    let full = watch.full && rows == Rows::Last;
    Want { rows, layers: watch.layers.clone(), max: watch.max, full, ..Want::nothing() }
}

/// Reads the end of the window; returns what its last token looked at, which is how the first token comes about. None
/// when the listener stopped it.
fn read_end(
    mirror: &mut Mirror,
    ask: &Ask,
    ready: &Ready,
    tell: &mut dyn FnMut(ModelStep<'_>) -> Flow,
) -> Result<Option<Seeing>, MirrorError> {
    let keys = crate::key::keys(&ask.window).ok_or(MirrorError::Disorder)?;
    let tokens: Vec<(Key, Token, bool)> = (ready.from..ask.window.len())
        .map(|n| (keys[n], ask.window[n].id.0.cast_signed(), ask.window[n].begins))
        .collect();
    let Some((&last, before)) = tokens.split_last() else { return Ok(None) };
    let batch = mirror.context().shape().batch as usize;
    let (of, mut done) = (tokens.len(), 0);
    if tell(ModelStep::Reading { done, of }) == Flow::Stop {
        return Ok(None);
    }
    let rows = match ask.watch.prompt {
        PromptRows::Off => Rows::None,
        PromptRows::Last => Rows::Last,
        PromptRows::All => Rows::All,
    };
    for part in before.chunks(batch) {
        done += part.len();
        // The last token of the last batch is read below, and its row comes with the token that it makes.
        let ends = done == before.len() && rows == Rows::Last;
        let seen = mirror.read(part, want(&ask.watch, if ends { Rows::None } else { rows }))?;
        for row in &seen {
            if tell(ModelStep::Prompt(Look { mean: &row.mean, max: &row.max, full: &[] })) == Flow::Stop {
                return Ok(None);
            }
        }
        if tell(ModelStep::Reading { done, of }) == Flow::Stop {
            return Ok(None);
        }
    }
    // A token that is read alone is not computed in quite the same way as one among many. The last one always is, so
    // that the same window gives the same answer, whether it was read now or long ago.
    let rows = if rows == Rows::None { rows } else { Rows::Last };
    let row = mirror.read(&[last], want(&ask.watch, rows))?.pop();
    Ok(Some(Seeing::of(mirror, row, &ask.watch)))
}

fn go_on(
    mirror: &mut Mirror,
    ask: &Ask,
    room: usize,
    mut seeing: Seeing,
    mut form: Option<Form>,
    tell: &mut dyn FnMut(ModelStep<'_>) -> Flow,
) -> Result<Finish, MirrorError> {
    let weights = std::sync::Arc::clone(mirror.context().weights());
    let mut sampler = Sampler::new(&weights, &ask.sampling);
    let recent = ask.window.len().saturating_sub(Sampler::WINDOW);
    ask.window[recent..].iter().for_each(|seen| sampler.said(seen.id.0.cast_signed()));
    let mut letters = Letters::default();
    // A character may have begun in the window.
    let ends = ask.window.iter().rev().take(4).rev();
    let bytes: Vec<u8> = ends.flat_map(|seen| weights.bytes(seen.id.0.cast_signed(), true)).collect();
    letters.push(&bytes);
    let mut stops = Stops::new(&ask.sampling.stop);
    for n in 0..room {
        let allowed = |token: Token| form.as_ref().is_none_or(|form| form.allows(token));
        let Some(token) = sampler.choose(mirror.context().guess(), allowed) else { return Ok(Finish::End) };
        if weights.ends(token) {
            return Ok(Finish::End);
        }
        sampler.said(token);
        let full = match form.as_mut().map(|form| form.said(token)) {
            None | Some(Ok(false)) => false,
            Some(Ok(true)) => true,
            Some(Err(why)) => {
                return Err(LlamaError::Decode(format!("the answer left its form: {why}")).into());
            }
        };
        let text = letters.push(&weights.bytes(token, true));
        let stopped = stops.said(&text);
        let piece = Piece { id: TokenId(token.cast_unsigned()), text };
        let look = seeing.look().filter(|_| ask.watch.answer);
        if tell(ModelStep::Token(&piece, look)) == Flow::Stop {
            return Ok(Finish::Aborted);
        }
        if stopped {
            return Ok(Finish::Stop);
        }
        if full {
            return Ok(Finish::End);
        }
        if n + 1 == room {
            break;
        }
        let key = Key::said(i64::try_from(ask.next.0).unwrap_or(i64::MAX)).plus(n);
        let rows = if ask.watch.answer { Rows::Last } else { Rows::None };
        let row = mirror.read(&[(key, token, n == 0)], want(&ask.watch, rows))?.pop();
        seeing = Seeing::of(mirror, row, &ask.watch);
    }
    Ok(Finish::Length)
}
