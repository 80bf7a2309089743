package configs

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
)

// Credentials are what the gateway shows to a replica and wants to see of it, for
// traffic and for every probe. They are immutable.
type Credentials struct {
	// Authorization is the header field's value ("Bearer KEY"); "": the client's is passed on.
	Authorization string
	// Metrics is the same for the metrics page; "": Authorization.
	Metrics string
	// TLS is the client side of TLS to https replicas. Without a ServerName the host of
	// the replica's URL is meant: a user clones it and fills it in.
	TLS *tls.Config
}

// Credentials reads the files that the settings name. The error has all problems.
func (u *Upstream) Credentials() (*Credentials, error) {
	own := Replica{APIKeyFile: u.APIKeyFile, CAFile: u.CAFile, ClientCertFile: u.ClientCertFile, ClientKeyFile: u.ClientKeyFile, ServerName: u.ServerName}
	c := &Credentials{TLS: &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}}
	return c, own.override(c, Position{Path: "upstream"})
}

// Credentials returns those of a replica, which are base but for what the replica
// itself names; nil when it names nothing. place is where it was declared, for
// the error, which has all problems.
func (r *Replica) Credentials(base *Credentials, place Position) (*Credentials, error) {
	if r.APIKeyFile == "" && r.CAFile == "" && r.ClientCertFile == "" && r.ClientKeyFile == "" && r.ServerName == "" && r.MetricsKeyFile == "" {
		return nil, nil
	}
	c := &Credentials{Authorization: base.Authorization, TLS: base.TLS.Clone()}
	return c, r.override(c, place)
}

func (r *Replica) override(c *Credentials, place Position) error {
	var problems Problems
	report := func(field, remedy string, err error) {
		if err != nil {
			problems.Add(Position{File: place.File, Line: place.Line, Column: place.Column, Path: joinPath(place.Path, field)}.Problem(remedy, "%v", err))
		}
	}
	if r.APIKeyFile != "" {
		key, err := ReadSecret(r.APIKeyFile)
		report("api_key_file", "name a file that holds the key and nothing else", err)
		c.Authorization = "Bearer " + key
	}
	if r.MetricsKeyFile != "" {
		key, err := ReadSecret(r.MetricsKeyFile)
		report("metrics_key_file", "name a file that holds the key and nothing else", err)
		c.Metrics = "Bearer " + key
	}
	if r.CAFile != "" {
		cas, err := ReadCAs(r.CAFile)
		report("ca_file", "name a PEM file of CA certificates", err)
		c.TLS.RootCAs = cas
	}
	if r.ClientCertFile != "" {
		pair, err := tls.LoadX509KeyPair(r.ClientCertFile, r.ClientKeyFile)
		report("client_cert_file", "name PEM files of a certificate and of its key", err)
		c.TLS.Certificates = []tls.Certificate{pair}
	}
	if r.ServerName != "" {
		c.TLS.ServerName = r.ServerName
	}
	return problems.Err()
}

// ReadCAs reads a PEM file of CA certificates.
func ReadCAs(file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s holds no PEM certificate", file)
	}
	return pool, nil
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
	cas, err := ReadCAs(t.ClientCAFile)
	c.ClientCAs, c.ClientAuth = cas, tls.RequireAndVerifyClientCert
	if err != nil {
		return nil, Position{Path: "tls.client_ca_file"}.Problem("name a PEM file of CA certificates", "%v", err)
	}
	return c, nil
}
