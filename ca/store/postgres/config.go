package postgres

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
)

// Config says which database, and as whom.
type Config struct {
	// URL names the database, such as postgres://chancery@db.example/chancery, with the parameters of libpq. Required. Without
	// sslmode the server's certificate is verified (verify-full), but for Unix sockets and loopback addresses, which go without
	// TLS. No password in it. Who can write the database can roll the state back or delete it, but not forge it.
	URL string `json:"url"`
	// PasswordFile holds the role's password, one line, mode 0600. It is read again for each connection. Default: what libpq
	// takes, PGPASSFILE or ~/.pgpass; none is needed where the database knows the role by certificate or by Unix user.
	PasswordFile string `json:"passwordFile,omitempty"`
	// Schema is the schema that holds the tables. One database can hold several authorities, each in a schema of its own.
	// Default chancery.
	Schema string `json:"schema,omitempty"`
}

// parameters are those that a URL may have. What changes what our statements mean is not among them.
var parameters = []string{
	"host", "port", "user", "dbname", "sslmode", "sslrootcert", "sslcert", "sslkey", "sslnegotiation", "sslsni", "channel_binding",
	"require_auth", "connect_timeout", "application_name", "target_session_attrs", "passfile",
}

// paths are those of parameters that name files.
var paths = []string{"sslrootcert", "sslcert", "sslkey", "passfile"}

var schemaName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)

// Check says what of the config is wrong, without a connection.
func (c Config) Check() error {
	_, err := c.parse()
	return err
}

// target is a config as it is used.
type target struct {
	url, passwordFile string // the URL with all that decides how we connect
	schema            string
	name              string // for errors
}

// parse makes the URL say what it leaves open.
func (c Config) parse() (target, error) {
	t := target{passwordFile: c.PasswordFile, schema: c.Schema}
	if t.schema == "" {
		t.schema = "chancery"
	}
	if !schemaName.MatchString(t.schema) || strings.HasPrefix(t.schema, "pg_") || t.schema == "information_schema" {
		return t, fmt.Errorf("schema %.80q: it should be 1 to 63 of a-z, 0-9 and _, with no digit first, and not be PostgreSQL's own", t.schema)
	}
	if c.PasswordFile != "" && !filepath.IsAbs(c.PasswordFile) {
		return t, fmt.Errorf("passwordFile %s: it should be an absolute path", c.PasswordFile)
	}
	query, err := splitURL(c.URL)
	if err != nil {
		return t, fmt.Errorf("url: %w", err)
	}
	// With TLS or without: the hosts are the same.
	mode := query.Get("sslmode")
	query.Set("sslmode", "disable")
	probe, err := parseURL(with(c.URL, query))
	if err != nil {
		return t, fmt.Errorf("url: %w", err)
	}
	local := isLocal(probe.Host)
	t.name = "PostgreSQL " + at(probe.Host, probe.Port)
	for _, f := range probe.Fallbacks {
		local = local && isLocal(f.Host)
		t.name += "," + at(f.Host, f.Port)
	}
	t.name += "/" + probe.Database + " (schema " + t.schema + ")"

	switch {
	case mode == "" && local:
		mode = "disable"
	case mode == "":
		mode = "verify-full"
	case mode == "allow" || mode == "prefer":
		return t, fmt.Errorf("url: sslmode=%s goes without TLS where somebody on the way asks for it; it should be verify-full, or at least say which: verify-ca, require or disable", mode)
	}
	query.Set("sslmode", mode)
	switch attrs := query.Get("target_session_attrs"); attrs {
	case "":
		query.Set("target_session_attrs", "read-write")
	case "read-write", "primary":
	default:
		return t, fmt.Errorf("url: target_session_attrs=%s: it should be read-write (the default) or primary; what a standby has may be old", attrs)
	}
	t.url = with(c.URL, query)
	if _, err = parseURL(t.url); err != nil {
		return t, fmt.Errorf("url: %w", err)
	}
	return t, nil
}

// splitURL returns the parameters of a URL that has no password. It quotes nothing of one that may have.
func splitURL(s string) (url.Values, error) {
	_, rest, ok := strings.Cut(s, "://")
	if !ok || !strings.HasPrefix(s, "postgres://") && !strings.HasPrefix(s, "postgresql://") {
		return nil, errors.New("it should be like postgres://chancery@db.example/chancery")
	}
	if strings.Contains(rest, "#") {
		return nil, errors.New("it holds a #; write %23 for one in a name")
	}
	before, text, _ := strings.Cut(rest, "?")
	query, err := url.ParseQuery(text)
	if err != nil {
		return nil, errors.New("what follows its ? cannot be read; it should be like sslmode=verify-full&sslrootcert=/etc/chancery/db-ca.pem")
	}
	authority, database, _ := strings.Cut(before, "/")
	user := authority[:max(0, strings.LastIndex(authority, "@"))]
	if strings.Contains(user, ":") || strings.Contains(database, "@") || query.Has("password") || query.Has("sslpassword") {
		return nil, errors.New("it seems to hold a password; put that into passwordFile, since configs and URLs get around")
	}
	if authority[len(user):] == "" && !query.Has("host") || authority == user+"@" && !query.Has("host") {
		return nil, errors.New("it names no host; for a Unix socket it should be like postgres:///chancery?host=/run/postgresql")
	}
	if (database == "" || strings.Contains(database, "/")) && !query.Has("dbname") {
		return nil, errors.New("it names no database; it should be like postgres://chancery@db.example/chancery")
	}
	for _, name := range paths {
		if path := query.Get(name); path != "" && !filepath.IsAbs(path) && (name != "sslrootcert" || path != "system") {
			return nil, fmt.Errorf("%s=%.200s: it should be an absolute path; in a URL none counts from the config's folder", name, path)
		}
	}
	for name, values := range query {
		if !slices.Contains(parameters, name) {
			if !schemaName.MatchString(name) {
				return nil, errors.New("what follows its ? are no parameters") // perhaps the rest of a password
			}
			return nil, fmt.Errorf("parameter %s is not known; there are %s", name, strings.Join(parameters, ", "))
		}
		if len(values) > 1 {
			return nil, fmt.Errorf("parameter %s is there %d times", name, len(values))
		}
	}
	return query, nil
}

// with returns a URL with other parameters.
func with(s string, query url.Values) string {
	before, _, _ := strings.Cut(s, "?")
	return before + "?" + query.Encode()
}

// parseURL returns what the library makes of a URL. Its errors quote the URL, in which a password may stand where none belongs.
func parseURL(s string) (*pgx.ConnConfig, error) {
	c, err := pgx.ParseConfigWithOptions(s, pgx.ParseConfigOptions{ParseConfigOptions: pgconn.ParseConfigOptions{ConnStringAllowedKeys: parameters}})
	if parse, ok := errors.AsType[*pgconn.ParseConfigError](err); ok {
		text := parse.Error()
		return nil, errors.New(text[strings.LastIndex(text, "`: ")+1+len(": "):])
	}
	return c, err
}

func isLocal(host string) bool {
	ip, err := netip.ParseAddr(host)
	return strings.HasPrefix(host, "/") || host == "localhost" || err == nil && ip.IsLoopback()
}

func at(host string, port uint16) string {
	_, address := pgconn.NetworkAddress(host, port)
	return address
}

// connConfig returns how to make a connection now: files may have changed.
func (t target) connConfig() (*pgx.ConnConfig, error) {
	c, err := parseURL(t.url)
	if err != nil {
		return nil, err
	}
	if t.passwordFile != "" {
		if c.Password, err = keys.ReadSecret("passwordFile", t.passwordFile); err != nil {
			return nil, err
		}
	}
	if c.ConnectTimeout <= 0 || c.ConnectTimeout > callTimeout {
		c.ConnectTimeout = callTimeout
	}
	if c.RuntimeParams["application_name"] == "" {
		c.RuntimeParams["application_name"] = "chancery"
	}
	// What the database or the role sets by default must not change what our statements mean.
	for name, value := range map[string]string{
		"search_path": "pg_catalog", "default_transaction_isolation": "read committed",
		"statement_timeout":                   millis(callTimeout),
		"lock_timeout":                        millis(callTimeout),
		"idle_in_transaction_session_timeout": millis(2 * callTimeout),
	} {
		c.RuntimeParams[name] = value
	}
	c.DefaultQueryExecMode = pgx.QueryExecModeExec // nothing is prepared, so nothing is kept
	c.StatementCacheCapacity, c.DescriptionCacheCapacity = 0, 0
	c.MaxProtocolMessageBodyLen = store.MaxDocument + 64<<10
	return c, nil
}

func millis(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// poolConfig returns that of a pool as small as our work is: a statement every few seconds.
func (t target) poolConfig() (*pgxpool.Config, error) {
	c, err := pgxpool.ParseConfig(t.url)
	if err != nil {
		return nil, err
	}
	if c.ConnConfig, err = t.connConfig(); err != nil {
		return nil, err
	}
	c.MaxConns, c.MinConns, c.MinIdleConns = 4, 0, 0
	c.MaxConnIdleTime, c.PingTimeout = 2*keepAlive, pingTimeout
	return c, nil
}

// channel is what changes are told on: one for each schema of a database.
func (t target) channel() string { return "chancery_" + t.hash("changes") }

// lockKey is that of the advisory lock that migrations of a schema take.
func (t target) lockKey() int64 {
	sum := sha256.Sum256([]byte("chancery migrations of " + t.schema))
	return int64(binary.BigEndian.Uint64(sum[:]))
}

// hash gives a short name for something of a schema, whose own name may be as long as names can be.
func (t target) hash(of string) string {
	sum := sha256.Sum256([]byte(of + " of " + t.schema))
	return strconv.FormatUint(binary.BigEndian.Uint64(sum[:]), 36)
}
