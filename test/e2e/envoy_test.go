package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"text/template"
	"time"
)

// EnvoyConfig is what the two roles of an Envoy have in common: where its certificate comes from and whom it talks to.
type EnvoyConfig struct {
	Name string // for the log, and the node id that SDS servers see

	// SDSSocket is the agent's Unix socket; Envoy asks it for CertName and RootName. Exactly one of SDSSocket and Files is set.
	SDSSocket string
	Files     *certFiles

	// Validation is a line of YAML with more fields for the validation context of Files.
	Validation string

	// RootFile, with Files, is a file with the validation context as an SDS resource ROOTCA, which Envoy watches.
	RootFile string

	// Resume lets sessions be resumed, as is Envoy's default; else each handshake shows both certificates. TicketKey is the
	// text of a server's key for session tickets, 80 bytes; empty: keys of Envoy's own.
	Resume    bool
	TicketKey string

	CertName string // SDS name of the certificate; empty: "default"
	RootName string // SDS name of the validation context; empty: "ROOTCA"

	// Default, with SDSSocket, has more fields, in YAML's flow style, for the validation context that Envoy joins with the one from SDS.
	Default string

	// PeerURI is the exact SPIFFE ID that the other side must present. Empty: no matcher, for a RootName whose context brings its
	// own (such as service:NS/NAME).
	PeerURI   string
	OtherURIs []string // that are admitted besides

	// MaxRequests is how many requests a client sends on a connection; 0: as many as there are.
	MaxRequests int

	// Anonymous is a client that shows no certificate.
	Anonymous bool

	// Upstream is HOST:PORT of the echo for a server, and of the server Envoy for a client; or a Unix socket, which begins with "/".
	Upstream string
}

// Envoy is a running Envoy 1.40.
type Envoy struct {
	*Process
	Admin  string // http://127.0.0.1:PORT of the admin interface
	Listen string // HOST:PORT of its listener; set by WaitReady
}

// Headers that the two Envoys add, so that a test sees which certificates a request has passed under.
const (
	clientSerialHeader = "x-client-serial" // by the server Envoy, to request and response: serial of the client's certificate
	serverCertHeader   = "x-server-cert"   // by the client Envoy, to the response: the server's certificate, URL-encoded PEM
	freshHeader        = "x-fresh"         // asks the client Envoy for a connection of this request's own
)

// StartServerEnvoy starts an Envoy that accepts mTLS from cfg.PeerURI only, and forwards to cfg.Upstream with
// x-forwarded-client-cert (URI, hash and certificate of the client). WaitReady waits until it has its certificates.
func StartServerEnvoy(t testing.TB, cfg EnvoyConfig) *Envoy {
	t.Helper()
	return startEnvoy(t, cfg, serverBootstrap)
}

// StartClientEnvoy starts an Envoy that takes plain HTTP/1.1 and forwards it by mTLS to cfg.Upstream, which must present
// cfg.PeerURI. Requests share kept connections, except that one with the header "x-fresh: 1" gets a new connection with a full
// handshake. Nothing is retried: a lost request is seen as lost.
func StartClientEnvoy(t testing.TB, cfg EnvoyConfig) *Envoy {
	t.Helper()
	return startEnvoy(t, cfg, clientBootstrap)
}

func startEnvoy(t testing.TB, cfg EnvoyConfig, bootstrap *template.Template) *Envoy {
	t.Helper()
	dir := t.TempDir()
	return runEnvoy(t, cfg.Name, dir, writeBootstrap(t, dir, cfg, bootstrap))
}

// runEnvoy starts an Envoy with a bootstrap in a folder of its own.
func runEnvoy(t testing.TB, name, dir, config string) *Envoy {
	t.Helper()
	adminFile := filepath.Join(dir, "admin-address")
	p := StartProcess(t, ProcessConfig{
		Name: name, Path: Tool(t, "envoy"),
		Args: []string{
			"--config-path", config, "--admin-address-path", adminFile,
			"--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning",
			"--service-node", name, "--service-cluster", "e2e",
		},
	})
	e := &Envoy{Process: p}
	e.waitAdmin(t, adminFile)
	return e
}

// waitAdmin waits until Envoy has written where its admin interface listens.
func (e *Envoy) waitAdmin(t testing.TB, file string) {
	t.Helper()
	e.WaitFor(t, 20*time.Second, "opens its admin port", func() error {
		addr, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if len(addr) == 0 {
			return errors.New("address file is empty")
		}
		e.Admin = "http://" + strings.TrimSpace(string(addr))
		return nil
	})
}

func writeBootstrap(t testing.TB, dir string, cfg EnvoyConfig, bootstrap *template.Template) string {
	t.Helper()
	if cfg.CertName == "" {
		cfg.CertName = "default"
	}
	if cfg.RootName == "" {
		cfg.RootName = "ROOTCA"
	}
	return writeTemplate(t, dir, bootstrap, cfg)
}

// writeTemplate writes a bootstrap.
func writeTemplate(t testing.TB, dir string, bootstrap *template.Template, data any) string {
	t.Helper()
	var text strings.Builder
	if err := bootstrap.Execute(&text, data); err != nil {
		t.Fatalf("writing a bootstrap: %v", err)
	}
	path := filepath.Join(dir, "envoy.yaml")
	writeFile(t, path, text.String(), 0o600)
	return path
}

// WaitReady waits until Envoy has all that it needs, certificates among it, and serves.
func (e *Envoy) WaitReady(t testing.TB, limit time.Duration) {
	t.Helper()
	e.WaitFor(t, limit, "is ready and listens", func() error {
		if _, err := httpGet(http.DefaultClient, e.Admin+"/ready"); err != nil {
			return err
		}
		var listeners struct {
			Statuses []struct {
				LocalAddress struct {
					SocketAddress struct {
						Address string `json:"address"`
						Port    int    `json:"port_value"`
					} `json:"socket_address"`
				} `json:"local_address"`
			} `json:"listener_statuses"`
		}
		if err := e.adminJSON("/listeners?format=json", &listeners); err != nil {
			return err
		}
		for _, l := range listeners.Statuses {
			if a := l.LocalAddress.SocketAddress; a.Address != "" { // else it is on a Unix socket
				e.Listen = net.JoinHostPort(a.Address, strconv.Itoa(a.Port))
				return nil
			}
		}
		return errors.New("no listener yet")
	})
}

// Stats returns the counters and gauges whose names match the regular expression.
func (e *Envoy) Stats(t testing.TB, filter string) map[string]uint64 {
	t.Helper()
	var answer struct {
		Stats []struct {
			Name  string          `json:"name"`
			Value json.RawMessage `json:"value"`
		} `json:"stats"`
	}
	if err := e.adminJSON("/stats?format=json&histogram_buckets=none&filter="+url.QueryEscape(filter), &answer); err != nil {
		t.Fatal(err)
	}
	stats := map[string]uint64{}
	for _, s := range answer.Stats {
		// Texts among the values, such as a version, are left out.
		if n, err := strconv.ParseUint(string(s.Value), 10, 64); err == nil {
			stats[s.Name] = n
		}
	}
	return stats
}

// EnvoyCert is a certificate or root that Envoy holds.
type EnvoyCert struct {
	Serial    string     `json:"serial_number"`
	NotBefore time.Time  `json:"valid_from"`
	NotAfter  time.Time  `json:"expiration_time"`
	AltNames  []EnvoySAN `json:"subject_alt_names"`
}

// EnvoySAN is one subject alternative name; the field of its kind is set.
type EnvoySAN struct {
	URI string `json:"uri"`
	DNS string `json:"dns"`
	IP  string `json:"ip_address"`
}

// Certs returns what Envoy holds now: leaf certificates with their chains, and roots.
func (e *Envoy) Certs(t testing.TB) (chains, roots []EnvoyCert) {
	t.Helper()
	var answer struct {
		Certificates []struct {
			CACert    []EnvoyCert `json:"ca_cert"`
			CertChain []EnvoyCert `json:"cert_chain"`
		} `json:"certificates"`
	}
	if err := e.adminJSON("/certs", &answer); err != nil {
		t.Fatal(err)
	}
	for _, c := range answer.Certificates {
		chains = append(chains, c.CertChain...)
		roots = append(roots, c.CACert...)
	}
	return chains, roots
}

func (e *Envoy) adminJSON(path string, v any) error {
	body, err := httpGet(http.DefaultClient, e.Admin+path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("reading %s of Envoy %s: %w", path, e.Name, err)
	}
	return nil
}

// StartEcho starts the HTTP server behind the server Envoy. It answers every request with the x-forwarded-client-cert header
// that it got, and returns its HOST:PORT.
func StartEcho(t testing.TB) string {
	t.Helper()
	return startEcho(t, func(string) {})
}

// startEcho is StartEcho that shows each of these headers to seen.
func startEcho(t testing.TB, seen func(xfcc string)) string {
	t.Helper()
	echo := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		xfcc := r.Header.Get("x-forwarded-client-cert")
		seen(xfcc)
		fmt.Fprintln(w, xfcc)
	}))
	t.Cleanup(echo.Close)
	return echo.Listener.Addr().String()
}

// The parts that both bootstraps share. Strings go in by %q: YAML reads them as Go writes them.
const bootstrapParts = `
{{define "admin"}}admin:
  address: {socket_address: {address: 127.0.0.1, port_value: 0}}
{{end}}
{{define "sds"}}{api_config_source: {api_type: GRPC, transport_api_version: V3, grpc_services: [{envoy_grpc: {cluster_name: agent}}]}, resource_api_version: V3, initial_fetch_timeout: 0s}{{end}}
{{define "peer"}}{{if .PeerURI}}match_typed_subject_alt_names: [{san_type: URI, matcher: {exact: {{printf "%q" .PeerURI}}}}
{{- range .OtherURIs}}, {san_type: URI, matcher: {exact: {{printf "%q" .}}}}{{end}}]{{end}}{{end}}
{{define "tls"}}
          common_tls_context:
            tls_params: {tls_minimum_protocol_version: TLSv1_3, tls_maximum_protocol_version: TLSv1_3}
{{- if .SDSSocket}}
            {{- if not .Anonymous}}
            tls_certificate_sds_secret_configs: [{name: {{printf "%q" .CertName}}, sds_config: {{template "sds"}}}]
            {{- end}}
            combined_validation_context:
              default_validation_context: { {{template "peer" .}}{{with .Default}}, {{.}}{{end}} }
              validation_context_sds_secret_config: {name: {{printf "%q" .RootName}}, sds_config: {{template "sds"}}}
{{- else}}
            tls_certificates: [{certificate_chain: {filename: {{printf "%q" .Files.Cert}}}, private_key: {filename: {{printf "%q" .Files.Key}}}}]
{{- if .RootFile}}
            validation_context_sds_secret_config: {name: ROOTCA, sds_config: {path_config_source: {path: {{printf "%q" .RootFile}}}, resource_api_version: V3}}
{{- else}}
            validation_context:
              trusted_ca: {filename: {{printf "%q" .Files.Root}}}
              {{.Validation}}
              {{template "peer" .}}
{{- end}}
{{- end}}
{{- end}}
{{define "agent"}}{{if .SDSSocket}}
  - name: agent
    type: STATIC
    connect_timeout: 5s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    load_assignment: {cluster_name: agent, endpoints: [{lb_endpoints: [{endpoint: {address: {pipe: {path: {{printf "%q" .SDSSocket}}}}}}]}]}
{{end}}{{end}}
{{define "upstream"}}{endpoints: [{lb_endpoints: [{endpoint: {address: {{template "address" .Upstream}}}}]}], cluster_name: upstream}{{end}}
{{define "address"}}{{with pipe .}}{pipe: {path: {{printf "%q" .}}}}{{else}}{socket_address: {address: {{host .}}, port_value: {{port .}}}}{{end}}{{end}}
{{define "router"}}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
{{end}}`

func bootstrap(name, text string) *template.Template {
	return template.Must(template.Must(template.New(name).Funcs(bootstrapFuncs).Parse(bootstrapParts)).Parse(text))
}

// bootstrapFuncs are functions of the templates. An address is HOST:PORT, or a Unix socket.
var bootstrapFuncs = template.FuncMap{
	"pipe": func(addr string) string {
		if strings.HasPrefix(addr, "/") {
			return addr
		}
		return ""
	},
	"host":     func(addr string) (string, error) { host, _, err := net.SplitHostPort(addr); return host, err },
	"requests": func(n int, cfg EnvoyConfig) map[string]any { return map[string]any{"Requests": n, "Config": cfg} },
	"port":     func(addr string) (string, error) { _, port, err := net.SplitHostPort(addr); return port, err },
}

var serverBootstrap = bootstrap("server", `{{template "admin"}}
static_resources:
  listeners:
  - name: inbound
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          require_client_certificate: true
          {{with .TicketKey}}session_ticket_keys: {keys: [{inline_string: {{printf "%q" .}}}]}{{else}}disable_stateless_session_resumption: {{not .Resume}}{{end}}
          {{- template "tls" .}}
      filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: inbound
          forward_client_cert_details: SANITIZE_SET
          set_current_client_cert_details: {uri: true, cert: true}
          {{- template "router"}}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              request_headers_to_add: [{header: {key: x-client-serial, value: "%DOWNSTREAM_PEER_SERIAL%"}, append_action: OVERWRITE_IF_EXISTS_OR_ADD}]
              response_headers_to_add: [{header: {key: x-client-serial, value: "%DOWNSTREAM_PEER_SERIAL%"}, append_action: OVERWRITE_IF_EXISTS_OR_ADD}]
              routes: [{match: {prefix: /}, route: {cluster: echo, timeout: 0s}}]
  clusters:
  - name: echo
    type: STATIC
    connect_timeout: 5s
    load_assignment: {{template "upstream" .}}
{{template "agent" .}}`)

var clientBootstrap = bootstrap("client", `{{define "cluster"}}
    type: STATIC
    connect_timeout: {{with .MaxRequests}}25{{else}}5{{end}}s
    load_assignment: {{template "upstream" .}}
    transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
          max_session_keys: {{if .Resume}}1{{else}}0{{end}}
          {{- template "tls" .}}
{{end}}{{template "admin"}}
static_resources:
  listeners:
  - name: outbound
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: outbound
          {{- template "router"}}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              response_headers_to_add: [{header: {key: x-server-cert, value: "%UPSTREAM_PEER_CERT%"}, append_action: OVERWRITE_IF_EXISTS_OR_ADD}]
              routes:
              - {match: {prefix: /, headers: [{name: x-fresh, string_match: {exact: "1"}}]}, route: {cluster: fresh, timeout: 0s}}
              - {match: {prefix: /}, route: {cluster: kept, timeout: 0s}}
  clusters:
  - name: kept
    {{- with .MaxRequests}}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        common_http_protocol_options: {max_requests_per_connection: {{.}}}
        explicit_http_config: {http_protocol_options: {}}
    {{- end}}
    {{- template "cluster" .}}
  - name: fresh
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        common_http_protocol_options: {max_requests_per_connection: 1}
        explicit_http_config: {http_protocol_options: {}}
    {{- template "cluster" .}}
{{template "agent" .}}`)
