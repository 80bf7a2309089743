package configs

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
)

// Certificates returns what the gateway shows to https replicas: none, or the
// one that upstream.client_cert_file and upstream.client_key_file hold.
func (u *Upstream) Certificates() ([]tls.Certificate, error) {
	if u.ClientCertFile == "" {
		return nil, nil
	}
	pair, err := tls.LoadX509KeyPair(u.ClientCertFile, u.ClientKeyFile)
	if err != nil {
		return nil, Position{Path: "upstream.client_cert_file"}.Problem("name PEM files of a certificate and of its key", "%v", err)
	}
	return []tls.Certificate{pair}, nil
}

// Config returns the server side of the data listener, nil when it speaks plain
// HTTP: TLS 1.2 or later, HTTP/1.1 alone, and a certificate of the client when
// tls.client_ca_file names who may issue it.
func (t *TLS) Config() (*tls.Config, error) {
	if t.CertFile == "" {
		return nil, nil
	}
	pair, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
	if err != nil {
		return nil, Position{Path: "tls.cert_file"}.Problem("name PEM files of a certificate and of its key", "%v", err)
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}, Certificates: []tls.Certificate{pair}}
	if t.ClientCAFile == "" {
		return c, nil
	}
	pem, err := os.ReadFile(t.ClientCAFile)
	c.ClientCAs, c.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
	if err == nil && !c.ClientCAs.AppendCertsFromPEM(pem) {
		err = fmt.Errorf("%s holds no PEM certificate", t.ClientCAFile)
	}
	if err != nil {
		return nil, Position{Path: "tls.client_ca_file"}.Problem("name a PEM file of CA certificates", "%v", err)
	}
	return c, nil
}
