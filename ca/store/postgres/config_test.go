package postgres

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// TestConfigDecides: what a URL leaves open is decided for safety, and the same whatever the environment says.
func TestConfigDecides(t *testing.T) {
	for _, name := range []string{"PGSSLMODE", "PGTARGETSESSIONATTRS", "PGHOST", "PGDATABASE"} {
		t.Setenv(name, map[string]string{"PGSSLMODE": "disable", "PGTARGETSESSIONATTRS": "any"}[name])
	}
	for url, want := range map[string]struct{ name, tls string }{
		"postgres://chancery@db.example/chancery":                                                   {"db.example:5432/chancery", "db.example"},
		"postgresql://chancery@db.example:6432/other":                                               {"db.example:6432/other", "db.example"},
		"postgres://chancery@192.0.2.7/chancery":                                                    {"192.0.2.7:5432/chancery", "192.0.2.7"},
		"postgres://chancery@[2001:db8::1]:5433/chancery":                                           {"[2001:db8::1]:5433/chancery", "2001:db8::1"},
		"postgres://chancery@db.example/chancery?sslmode=disable":                                   {"db.example:5432/chancery", "no"},
		"postgres://chancery@db.example/chancery?sslmode=require":                                   {"db.example:5432/chancery", "unverified"},
		"postgres://chancery@127.0.0.1/chancery":                                                    {"127.0.0.1:5432/chancery", "no"},
		"postgres://chancery@localhost/chancery":                                                    {"localhost:5432/chancery", "no"},
		"postgres://chancery@localhost/chancery?sslmode=verify-full":                                {"localhost:5432/chancery", "localhost"},
		"postgres:///chancery?host=/run/postgresql":                                                 {"/run/postgresql/.s.PGSQL.5432/chancery", "no"},
		"postgres://chancery@/chancery?host=/run/postgresql&port=6000":                              {"/run/postgresql/.s.PGSQL.6000/chancery", "no"},
		"postgres://chancery@/chancery?host=a.example,b.example":                                    {"a.example:5432,b.example:5432/chancery", "a.example"},
		"postgres://chancery@a.example,b.example/chancery?target_session_attrs=primary":             {"a.example:5432,b.example:5432/chancery", "a.example"},
		"postgres://chancery@a.example:5433,b.example:5434/chancery":                                {"a.example:5433,b.example:5434/chancery", "a.example"},
		"postgres://chancery@/chancery?host=127.0.0.1,b.example":                                    {"127.0.0.1:5432,b.example:5432/chancery", "127.0.0.1"},
		"postgres://chancery@db.example/?dbname=chancery&connect_timeout=3&channel_binding=require": {"db.example:5432/chancery", "db.example"},
	} {
		target, err := Config{URL: url}.parse()
		if err != nil {
			t.Errorf("%s: %v", url, err)
			continue
		}
		if target.name != "PostgreSQL "+want.name+" (schema chancery)" {
			t.Errorf("%s: named %s", url, target.name)
		}
		c, err := target.connConfig()
		if err != nil {
			t.Errorf("%s: %v", url, err)
			continue
		}
		if got := tlsOf(c); got != want.tls {
			t.Errorf("%s: TLS %s; want %s", url, got, want.tls)
		}
		for _, f := range c.Fallbacks {
			if (f.TLSConfig == nil) != (c.TLSConfig == nil) {
				t.Errorf("%s: one host with TLS and one without", url)
			}
		}
		if c.ValidateConnect == nil {
			t.Errorf("%s: a standby would do", url)
		}
		if c.ConnectTimeout <= 0 || c.ConnectTimeout > callTimeout || c.RuntimeParams["search_path"] != "pg_catalog" {
			t.Errorf("%s: %+v", url, c)
		}
	}
}

// tlsOf says whose certificate is expected.
func tlsOf(c *pgx.ConnConfig) string {
	switch {
	case c.TLSConfig == nil:
		return "no"
	case c.TLSConfig.InsecureSkipVerify:
		return "unverified"
	}
	return c.TLSConfig.ServerName
}

func TestConfigRefuses(t *testing.T) {
	for _, tc := range []struct{ url, want string }{
		{"", "postgres://"},
		{"chancery", "postgres://"},
		{"mysql://chancery@db.example/chancery", "postgres://"},
		{"host=db.example user=chancery", "postgres://"},
		{"postgres://chancery@db.example", "names no database"},
		{"postgres://chancery@db.example/", "names no database"},
		{"postgres://chancery@db.example/a/b", "names no database"},
		{"postgres:///chancery", "names no host"},
		{"postgres://chancery@/chancery", "names no host"},
		{"postgres://chancery@db.example/chancery?sslmode=prefer", "sslmode=prefer"},
		{"postgres://chancery@localhost/chancery?sslmode=allow", "sslmode=allow"},
		{"postgres://chancery@db.example/chancery?sslmode=verify", "sslmode"},
		{"postgres://chancery@db.example/chancery?target_session_attrs=any", "target_session_attrs=any"},
		{"postgres://chancery@db.example/chancery?target_session_attrs=standby", "may be old"},
		{"postgres://chancery@db.example/chancery?search_path=public", "search_path is not known"},
		{"postgres://chancery@db.example/chancery?options=-csearch_path%3Dx", "options is not known"},
		{"postgres://chancery@db.example/chancery?service=x", "service is not known"},
		{"postgres://chancery@db.example/chancery?pool_max_conns=1000", "pool_max_conns is not known"},
		{"postgres://chancery@db.example/chancery?statement_timeout=0", "statement_timeout is not known"},
		{"postgres://chancery@db.example/chancery?sslmode=disable&sslmode=verify-full", "2 times"},
		{"postgres://chancery@db.example/chancery?sslrootcert=/nonexistent/ca.pem", "/nonexistent/ca.pem"},
		{"postgres://chancery@db.example/chancery?sslrootcert=db-ca.pem", "sslrootcert=db-ca.pem: it should be an absolute path"},
		{"postgres://chancery@db.example/chancery?sslcert=c.pem&sslkey=/k.pem", "sslcert=c.pem: it should be an absolute path"},
		{"postgres://chancery@db.example/chancery?sslcert=/c.pem&sslkey=k.pem", "sslkey=k.pem: it should be an absolute path"},
		{"postgres://chancery@db.example/chancery?passfile=pass", "passfile=pass: it should be an absolute path"},
		{"postgres://chancery@db.example:99999/chancery", "port"},
		{"postgres://chancery@db.example/chancery#x", "%23"},
	} {
		if err := (Config{URL: tc.url}).Check(); err == nil || !strings.Contains(err.Error(), tc.want) || !strings.HasPrefix(err.Error(), "url: ") {
			t.Errorf("%s: got %v; want url: ... %s", tc.url, err, tc.want)
		}
	}
	const url = "postgres://chancery@db.example/chancery"
	for _, name := range []string{"Chancery", "a-b", "1a", `a"b`, "pg_temp", "pg_catalog", "information_schema", "a.b", strings.Repeat("a", 64)} {
		if err := (Config{URL: url, Schema: name}).Check(); err == nil || !strings.HasPrefix(err.Error(), "schema ") {
			t.Errorf("schema %q: %v", name, err)
		}
	}
	if err := (Config{URL: url, PasswordFile: "password"}).Check(); err == nil || !strings.Contains(err.Error(), "absolute") {
		t.Errorf("a relative passwordFile: %v", err)
	}
}

// TestConfigNeverQuotesAPassword, wherever in a URL somebody puts one.
func TestConfigNeverQuotesAPassword(t *testing.T) {
	for _, url := range []string{
		"postgres://chancery:hunter2@db.example/chancery", "postgres://chancery:hunter2@db.example", "postgres://:hunter2@db.example/chancery",
		"postgres://chancery:a@hunter2@db.example/chancery", "postgres://chancery:a/hunter2@db.example/chancery", "postgres://chancery:hunter2/b@db.example/chancery",
		"postgres://chancery:a?hunter2@db.example/chancery", "postgres://chancery:hunter2?b@db.example/chancery", "postgres://chancery:a?hunter2=b@db.example/chancery",
		"postgres://chancery:a?hunter2&b@db.example/chancery",
		"postgres://chancery:a#hunter2@db.example/chancery", "postgres://chancery:hunter2#b@db.example/chancery", "postgres://chancery:%zzhunter2@db.example/chancery",
		"postgres://chancery:hunter2/chancery", "postgres://chancery:hunter2", "postgres://db.example/chancery?password=hunter2", "postgres://db.example/chancery?sslpassword=hunter2&host=x",
		"postgres://db.example/chancery?user=a&password=hunter2%zz", "chancery:hunter2@db.example/chancery", "password=hunter2 host=db.example",
	} {
		err := Config{URL: url}.Check()
		if err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", url, err)
		}
	}
}

// TestPasswordIsReadForEachConnection: it may be exchanged while we run, and is never somebody else's to read.
func TestPasswordIsReadForEachConnection(t *testing.T) {
	file := filepath.Join(t.TempDir(), "password")
	target, err := Config{URL: "postgres://chancery@db.example/chancery", PasswordFile: file}.parse()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := target.connConfig(); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("without the file: %v", err)
	}
	for _, password := range []string{"first", "second"} {
		if err := os.WriteFile(file, []byte(password+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if c, err := target.connConfig(); err != nil || c.Password != password {
			t.Errorf("%v", err)
		}
	}
	if err := os.Chmod(file, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := target.connConfig(); err == nil || !strings.Contains(err.Error(), "0600") || strings.Contains(err.Error(), "second") {
		t.Errorf("a file that others can read: %v", err)
	}
}
