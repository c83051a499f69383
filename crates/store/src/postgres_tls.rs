//! TLS to PostgreSQL as libpq offers it: the parameters `sslmode` and `sslrootcert` of the address say whether the connection
//! is encrypted, and whether the certificate and the name of the server are checked.

use crate::sql::SqlError;
use std::fs;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::config::SslMode;
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::verify_server_name;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore, SignatureScheme,
};

/// What is encrypted and checked; the words are those of libpq.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TlsMode {
    Disable,
    /// Encrypted if the server can; nothing is checked.
    #[default]
    Prefer,
    /// Encrypted; nothing is checked.
    Require,
    /// The certificate of the server is signed by a trusted authority.
    VerifyCa,
    /// It is also one for the host name of the address.
    VerifyFull,
}

impl TlsMode {
    pub(crate) fn parse(word: &str) -> Result<Self, SqlError> {
        Ok(match word {
            "disable" => Self::Disable,
            "prefer" | "allow" => Self::Prefer,
            "require" => Self::Require,
            "verify-ca" => Self::VerifyCa,
            "verify-full" => Self::VerifyFull,
            _ => {
                return Err(SqlError::invalid_input(
                    "the parameter sslmode of the PostgreSQL address is one of disable, prefer, require, verify-ca and \
                     verify-full",
                ));
            }
        })
    }
}

/// The parameters of an address that are about TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TlsParameters {
    pub mode: TlsMode,
    /// `sslrootcert`: a PEM file of trusted authorities, or `system`.
    pub root_certificates: Option<String>,
}

/// Opens TLS connections to PostgreSQL servers.
#[derive(Clone)]
pub(crate) struct PostgresTls(Arc<ClientConfig>);

impl TlsParameters {
    /// The mode for the client, and how it connects.
    pub(crate) fn connector(&self) -> Result<(SslMode, PostgresTls), SqlError> {
        // With a file of authorities, libpq checks the certificate although only encryption was asked for.
        let checks_file = self.mode == TlsMode::Require && self.root_certificates.is_some();
        let mode = if checks_file { TlsMode::VerifyCa } else { self.mode };
        let ssl_mode = match mode {
            TlsMode::Disable => SslMode::Disable,
            TlsMode::Prefer => SslMode::Prefer,
            TlsMode::Require | TlsMode::VerifyCa | TlsMode::VerifyFull => SslMode::Require,
        };
        let provider = Arc::new(ring::default_provider());
        let trust = match mode {
            TlsMode::Disable | TlsMode::Prefer | TlsMode::Require => None,
            TlsMode::VerifyCa | TlsMode::VerifyFull => {
                Some(TrustedRoots::load(self.root_certificates.as_deref(), &provider)?)
            }
        };
        let verifier = ServerVerifier {
            trust,
            checks_name: mode == TlsMode::VerifyFull,
            provider: Arc::clone(&provider),
        };
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| SqlError::invalid_input(e.to_string()))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        Ok((ssl_mode, PostgresTls(Arc::new(config))))
    }
}

#[derive(Debug)]
struct TrustedRoots {
    /// A server may present a certificate that is in the file itself: a self-signed one is its own authority.
    certificates: Vec<CertificateDer<'static>>,
    webpki: Arc<WebPkiServerVerifier>,
}

impl TrustedRoots {
    /// Reads the file that `sslrootcert` names, else that of libpq in the home folder; else those of the system.
    fn load(file: Option<&str>, provider: &Arc<CryptoProvider>) -> Result<Self, SqlError> {
        let libpq_file = || {
            let home = std::env::var_os("HOME").map(PathBuf::from)?;
            Some(home.join(".postgresql/root.crt")).filter(|path| path.exists())
        };
        let file = file.map(PathBuf::from).or_else(libpq_file).filter(|path| path != Path::new("system"));
        let (certificates, source) = match file {
            Some(path) => {
                let failed = |why: String| {
                    SqlError::invalid_input(format!("{}, which sslrootcert names: {why}", path.display()))
                };
                let pem = fs::read(&path).map_err(|e| failed(e.to_string()))?;
                let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
                (certificates.map_err(|e| failed(e.to_string()))?, path.display().to_string())
            }
            None => (rustls_native_certs::load_native_certs().certs, "the system".to_owned()),
        };
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(certificates.iter().cloned());
        if roots.is_empty() {
            let why = format!(
                "there is no certificate of an authority in {source}: name a PEM file in the parameter sslrootcert of \
                 the PostgreSQL address"
            );
            return Err(SqlError::invalid_input(why));
        }
        let webpki =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider)).build();
        let webpki = webpki.map_err(|e| SqlError::invalid_input(e.to_string()))?;
        Ok(Self { certificates, webpki })
    }
}

/// Checks as much of a server's certificate as the mode asks for. That the server has its key is always checked.
#[derive(Debug)]
struct ServerVerifier {
    /// None where any certificate is accepted.
    trust: Option<TrustedRoots>,
    checks_name: bool,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        let Some(trust) = &self.trust else { return Ok(ServerCertVerified::assertion()) };
        if trust.certificates.iter().any(|trusted| trusted.as_ref() == end_entity.as_ref()) {
            if self.checks_name {
                verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
            }
            return Ok(ServerCertVerified::assertion());
        }
        let verified =
            trust.webpki.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        match verified {
            // The name is checked last, when the certificate has been found to be trusted.
            Err(TlsError::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if !self.checks_name => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Opens the TLS connection to one host.
pub(crate) struct HostTls {
    connector: TlsConnector,
    name: ServerName<'static>,
}

/// A connection within TLS.
pub(crate) struct EncryptedStream<S>(tokio_rustls::client::TlsStream<S>);

impl<S> MakeTlsConnect<S> for PostgresTls
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = EncryptedStream<S>;
    type TlsConnect = HostTls;
    type Error = io::Error;

    fn make_tls_connect(&mut self, host: &str) -> io::Result<HostTls> {
        // A socket of this machine has no name, and no TLS.
        let host = if host.is_empty() { "localhost" } else { host };
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        Ok(HostTls { connector: TlsConnector::from(Arc::clone(&self.0)), name })
    }
}

impl<S> TlsConnect<S> for HostTls
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = EncryptedStream<S>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<EncryptedStream<S>>> + Send>>;

    fn connect(self, stream: S) -> Self::Future {
        Box::pin(async move { self.connector.connect(self.name, stream).await.map(EncryptedStream) })
    }
}

impl<S> TlsStream for EncryptedStream<S>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    fn channel_binding(&self) -> ChannelBinding {
        // The password is still never sent: SCRAM proves that both sides know it.
        ChannelBinding::none()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for EncryptedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for EncryptedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
