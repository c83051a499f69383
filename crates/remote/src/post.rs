//! JSON for a server that has nothing to answer.

use crate::Options;
use crate::address::Base;
use crate::http::{Client, Request, nobody};
use crate::stream::{Halt, Teller};
use halo_core::seams::SeamError;
use serde_json::Value;

/// Sends JSON to one place.
#[derive(Debug)]
pub struct Poster {
    client: Client,
    base: Base,
    path: &'static str,
    options: Options,
}

impl Poster {
    /// To a path of a server, such as `http://127.0.0.1:4318`.
    ///
    /// # Errors
    /// When that is no address.
    pub fn new(server: &str, path: &'static str) -> Result<Self, SeamError> {
        let base = Base::parse(server.trim_end_matches('/'));
        let base = base.map_err(|why| SeamError::new(format!("reading the address '{server}'"), why))?;
        let options = Options::default();
        Ok(Self { client: Client::new(&options)?, base, path, options })
    }

    /// Sends it; whatever is answered, the error aside, is of no interest.
    ///
    /// # Errors
    /// When it did not arrive, or was refused.
    pub fn post(&self, what: &str, body: &Value) -> Result<(), SeamError> {
        let request = Request::post(what, &self.base, self.path, body).within(self.options.quick);
        let mut listen = nobody;
        let mut teller = Teller::nobody(&mut listen);
        let answer = self.client.open(&request, &mut teller).map_err(Halt::error)?;
        if !answer.status.is_success() {
            return Err(self.client.refusal(&request, answer, &mut teller).error());
        }
        Ok(())
    }
}
