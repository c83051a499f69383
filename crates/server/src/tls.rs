//! TLS for servers that listen beyond loopback.

use halo_core::Error;
use std::path::PathBuf;
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// A certificate chain and its private key.
#[derive(Clone)]
pub struct TlsConfig(pub(crate) TlsAcceptor);

/// The content of a PEM file, with its path for error messages.
pub struct PemFile {
    pub path: PathBuf,
    pub content: Vec<u8>,
}

impl TlsConfig {
    /// Parses the certificate chain and the private key.
    pub fn from_pem(certificate: &PemFile, key: &PemFile) -> Result<Self, Error> {
        let failed = |file: &PemFile, message: String| {
            Error::invalid_input(format!("reading {} for TLS", file.path.display()), message)
        };
        let chain = CertificateDer::pem_slice_iter(&certificate.content).collect::<Result<Vec<_>, _>>();
        let chain = chain.map_err(|e| failed(certificate, e.to_string()))?;
        if chain.is_empty() {
            return Err(failed(certificate, "it contains no certificate; it must be a PEM file".into()));
        }
        let secret = PrivateKeyDer::from_pem_slice(&key.content).map_err(|e| failed(key, e.to_string()))?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|config| config.with_no_client_auth().with_single_cert(chain, secret));
        let mut config =
            config.map_err(|e| failed(key, format!("the key does not match the certificate: {e}")))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }
}
