//! TLS, for those who listen beyond this machine.

use halo_core::Error;
use std::path::Path;
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// A certificate, and the key to it.
#[derive(Clone)]
pub struct TlsConfig(pub(crate) TlsAcceptor);

impl TlsConfig {
    /// Reads a certificate with those that vouch for it, and its key: two files in PEM.
    pub fn read(certificate: &Path, key: &Path) -> Result<Self, Error> {
        let failed = |path: &Path, why: String| {
            Error::invalid_input(format!("reading {} for TLS", path.display()), why)
        };
        let chain =
            CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let chain = chain.map_err(|e| failed(certificate, e.to_string()))?;
        if chain.is_empty() {
            return Err(failed(certificate, "there is no certificate in it: it must be PEM".into()));
        }
        let secret = PrivateKeyDer::from_pem_file(key).map_err(|e| failed(key, e.to_string()))?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|config| config.with_no_client_auth().with_single_cert(chain, secret));
        let mut config = config.map_err(|e| failed(key, format!("it does not fit the certificate: {e}")))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }
}
