//! The thread and its queue, with a fake encoder that waits for permission before each batch.

use super::worker::SentenceEncoder;
use super::*;
use halo_core::ErrorKind;
use parking_lot::Mutex;
use std::sync::mpsc::{Receiver, SyncSender};

/// An encoder whose tokens are the bytes of a text, and whose vectors are their sum and their number. It reports each
/// batch when it starts, and waits for permission to proceed.
struct FakeEncoder {
    started: SyncSender<usize>,
    proceed: Arc<Mutex<Receiver<()>>>,
    info: EmbedderInfo,
}

impl SentenceEncoder for FakeEncoder {
    fn info(&self) -> &EmbedderInfo {
        &self.info
    }

    fn can_batch(&self) -> bool {
        true
    }

    /// A text of more than 99 bytes has two pieces.
    fn tokenize(&self, text: &str) -> Vec<Vec<i32>> {
        let tokens: Vec<i32> = text.bytes().map(i32::from).collect();
        match tokens.len() > self.info.max_tokens {
            true => tokens.chunks(tokens.len().div_ceil(2)).map(<[i32]>::to_vec).collect(),
            false => vec![tokens],
        }
    }

    fn count_tokens(&self, text: &str) -> usize {
        text.len()
    }

    fn encode(&self, texts: &[Vec<i32>]) -> Result<Vec<Vec<f32>>, Error> {
        let _ = self.started.send(texts[0].len());
        let _ = self.proceed.lock().recv();
        match texts[0].len() {
            13 => panic!("thirteen"),
            12 => Err(Error::internal("running the embedder", "twelve")),
            _ => Ok(texts
                .iter()
                .map(|text| vec![text.iter().sum::<i32>() as f32, text.len() as f32])
                .collect()),
        }
    }
}

/// A handle to a fake encoder that fails to load `failures` times, the lengths of started batches, and the permissions.
fn fake_embedder(mut failures: usize) -> (EmbedderHandle, Receiver<usize>, SyncSender<()>) {
    let (started, batches) = sync_channel(1000);
    let (permit, proceed) = sync_channel(1000);
    let proceed = Arc::new(Mutex::new(proceed));
    let load = move || -> Result<Box<dyn SentenceEncoder>, Error> {
        if failures > 0 {
            failures -= 1;
            return Err(Error::internal("loading the embedder", "not yet"));
        }
        let info =
            EmbedderInfo { name: "fake".into(), dimensions: 2, max_tokens: 99, ..EmbedderInfo::default() };
        Ok(Box::new(FakeEncoder { started: started.clone(), proceed: Arc::clone(&proceed), info }))
    };
    (EmbedderHandle::start(Box::new(load)).expect("started"), batches, permit)
}

/// Permits all batches of a test.
fn unblock_all(permit: &SyncSender<()>) {
    (0..900).for_each(|_| permit.send(()).expect("the channel has room"));
}

fn texts(lengths: &[usize]) -> Vec<String> {
    lengths.iter().map(|&length| "a".repeat(length)).collect()
}

fn expected_vector(length: usize) -> Vec<f32> {
    vec![97.0 * length as f32, length as f32]
}

#[test]
fn embed_returns_vectors_in_order_of_texts() {
    let (mut embedder, _batches, permit) = fake_embedder(0);
    unblock_all(&permit);
    let texts = texts(&[5, 3, 0, 5, 4]);
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    assert_eq!(embedder.embed(&texts), Ok([5, 3, 0, 5, 4].map(expected_vector).into()));
    assert_eq!(embedder.embed(&[]), Ok(vec![]));
    assert_eq!(embedder.info().map(|info| info.name), Ok("fake".into()));
}

/// The vectors of the pieces are (97 n, n) for n bytes, so their mean has the direction (97, 1).
#[test]
fn embed_joins_the_pieces_of_long_texts() {
    let (mut embedder, batches, permit) = fake_embedder(0);
    unblock_all(&permit);
    let texts = texts(&[101, 3]);
    let vectors = embedder.embed(&[&texts[0], &texts[1]]).expect("embedded");
    assert_eq!(vectors[1], expected_vector(3), "a short text stays as it is");
    let is_mean = |vector: &[f32]| {
        let length = 97.0f32.hypot(1.0);
        (vector[0] - 97.0 / length).abs() < 1e-5 && (vector[1] - 1.0 / length).abs() < 1e-5
    };
    assert!(is_mean(&vectors[0]), "{vectors:?}");
    assert_eq!(batches.try_iter().collect::<Vec<_>>(), [3, 50, 51]);
    let mut received = Vec::new();
    let mut listener = |index: usize, vector: Vec<f32>| {
        received.push((index, vector));
        StepFlow::Continue
    };
    embedder.embed_in_background(texts, &mut listener).expect("embedded");
    assert_eq!(received.len(), 2, "one vector per text");
    assert!(received[0] == (1, expected_vector(3)) && is_mean(&received[1].1), "{received:?}");
    assert_eq!(embedder.count_tokens(&["abc", ""]), Ok(vec![3, 0]));
}

#[test]
fn embed_runs_before_background_batches() {
    let (embedder, batches, permit) = fake_embedder(0);
    let embed_in_background = |mut embedder: EmbedderHandle, lengths: &'static [usize]| {
        std::thread::spawn(move || {
            let mut received = Vec::new();
            let mut listener = |index: usize, vector: Vec<f32>| {
                received.push((index, vector));
                StepFlow::Continue
            };
            embedder.embed_in_background(texts(lengths), &mut listener).map(|()| received)
        })
    };
    let first = embed_in_background(embedder.clone(), &[3, 1, 2, 3]);
    assert_eq!(batches.recv(), Ok(1), "the shortest background text is running");
    let second = embed_in_background(embedder.clone(), &[9]);
    let (reply, result) = sync_channel(1);
    embedder.send(EmbedderRequest::Embed { texts: texts(&[7, 6]), reply }).expect("sent");
    unblock_all(&permit);
    assert_eq!(result.recv().expect("answered"), Ok(vec![expected_vector(7), expected_vector(6)]));
    let received = first.join().expect("no panic").expect("no error");
    assert_eq!(
        received,
        [(1, expected_vector(1)), (2, expected_vector(2)), (0, expected_vector(3)), (3, expected_vector(3))]
    );
    assert_eq!(second.join().expect("no panic"), Ok(vec![(0, expected_vector(9))]));
    assert_eq!(
        batches.try_iter().collect::<Vec<_>>(),
        [6, 7, 2, 3, 9],
        "queries first, texts of equal length together"
    );
}

#[test]
fn embed_background_stops_when_listener_stops() {
    let (mut embedder, batches, permit) = fake_embedder(0);
    (0..3).for_each(|_| permit.send(()).expect("the channel has room"));
    let mut received = 0;
    let lengths: Vec<usize> = (20..90).collect();
    let mut listener = |_, _| {
        received += 1;
        if received == 3 { StepFlow::Stop } else { StepFlow::Continue }
    };
    assert_eq!(embedder.embed_in_background(texts(&lengths), &mut listener), Ok(()));
    assert_eq!(received, 3, "no vector after the stop");
    unblock_all(&permit);
    assert_eq!(embedder.embed(&["aa"]), Ok(vec![expected_vector(2)]));
    let started: Vec<_> = batches.try_iter().filter(|&length| length != 23).collect();
    assert_eq!(started, [20, 21, 22, 2], "the fourth may have been running and is filtered out");
}

#[test]
fn embed_background_stops_between_batches() {
    let (embedder, batches, permit) = fake_embedder(0);
    let (results, received) = channel();
    let stop = Arc::new(AtomicBool::new(false));
    let job = BackgroundEmbed::new(texts(&[1, 2, 3]), results, Arc::clone(&stop));
    embedder.send(EmbedderRequest::Background(job)).expect("sent");
    assert_eq!(batches.recv(), Ok(1));
    stop.store(true, Ordering::Relaxed);
    unblock_all(&permit);
    assert_eq!(
        received.iter().collect::<Vec<_>>(),
        [Ok((0, expected_vector(1)))],
        "the running batch is finished"
    );
    assert_eq!(batches.try_iter().count(), 0);
}

#[test]
fn embed_background_batches_many_texts() {
    let (mut embedder, batches, permit) = fake_embedder(0);
    unblock_all(&permit);
    let mut embedded = vec![false; 2000];
    let mut listener = |index: usize, _| {
        embedded[index] = true;
        StepFlow::Continue
    };
    assert_eq!(embedder.embed_in_background(texts(&[8; 2000]), &mut listener), Ok(()));
    assert!(embedded.iter().all(|embedded| *embedded));
    assert_eq!(batches.try_iter().count(), 3 * 512 / 64 + 464usize.div_ceil(64));
    assert_eq!(embedder.embed_in_background(vec![], &mut |_, _| StepFlow::Stop), Ok(()));
}

#[test]
fn embed_reports_load_error_until_model_loads() {
    let (mut embedder, _batches, permit) = fake_embedder(4);
    unblock_all(&permit);
    let not_yet = || Error::internal("loading the embedder", "not yet");
    assert_eq!(embedder.info(), Err(not_yet()));
    assert_eq!(embedder.embed(&["a"]), Err(not_yet()));
    assert_eq!(
        embedder.clone().embed_in_background(texts(&[1, 2]), &mut |_, _| StepFlow::Continue),
        Err(not_yet())
    );
    assert_eq!(embedder.embed(&[]), Err(not_yet()));
    assert_eq!(embedder.embed(&["a"]), Ok(vec![expected_vector(1)]), "the next request loads it");
}

#[test]
fn embed_failure_affects_one_job_only() {
    let (mut embedder, _batches, permit) = fake_embedder(0);
    unblock_all(&permit);
    let mut received = 0;
    let mut listener = |_, _| {
        received += 1;
        StepFlow::Continue
    };
    let twelve = embedder.embed_in_background(texts(&[14, 12, 11]), &mut listener);
    assert_eq!(twelve, Err(Error::internal("running the embedder", "twelve")));
    assert_eq!(received, 1, "the batch before the error");
    let thirteen = embedder.embed(&["aaaaaaaaaaaaa"]);
    assert_eq!(thirteen.map_err(|error| error.kind), Err(ErrorKind::Internal), "a panic");
    assert_eq!(embedder.embed(&["a"]), Ok(vec![expected_vector(1)]));
}

#[test]
fn embed_thread_ends_when_last_handle_drops() {
    let (embedder, batches, permit) = fake_embedder(0);
    let (results, received) = channel();
    let job = BackgroundEmbed::new(texts(&[1, 2, 3]), results, Arc::new(AtomicBool::new(false)));
    embedder.send(EmbedderRequest::Background(job)).expect("sent");
    assert_eq!(batches.recv(), Ok(1));
    permit.send(()).expect("the channel has room");
    let clone = embedder.clone();
    drop(embedder);
    assert_eq!(batches.recv(), Ok(2), "a clone keeps the thread alive");
    drop(received);
    unblock_all(&permit);
    drop(clone);
    assert_eq!(batches.try_iter().count(), 0, "the thread has ended");
}
