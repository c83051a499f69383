//! TLS for servers that listen beyond loopback.

use halo_core::Error;
use std::path::Path;
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// A certificate chain and its private key.
#[derive(Clone)]
pub struct TlsConfig(pub(crate) TlsAcceptor);

impl TlsConfig {
    /// Reads the certificate chain and the private key from two PEM files.
    pub fn read(certificate: &Path, key: &Path) -> Result<Self, Error> {
        let failed = |path: &Path, message: String| {
            Error::invalid_input(format!("reading {} for TLS", path.display()), message)
        };
        let chain =
            CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let chain = chain.map_err(|e| failed(certificate, e.to_string()))?;
        if chain.is_empty() {
            return Err(failed(certificate, "it contains no certificate; it must be a PEM file".into()));
        }
        let secret = PrivateKeyDer::from_pem_file(key).map_err(|e| failed(key, e.to_string()))?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|config| config.with_no_client_auth().with_single_cert(chain, secret));
        let mut config =
            config.map_err(|e| failed(key, format!("the key does not match the certificate: {e}")))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }
}
